"""What is shared with a prompt, and what is kept of it: one core for serving, `explain` and replay."""
