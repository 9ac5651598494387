"""The forms and questions that the demo model was trained on; lab/scripts train and evaluate it."""
