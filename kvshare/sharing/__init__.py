"""Plans what a prompt copies from stored prompts, and stores it: for serving, `explain` and replay."""
