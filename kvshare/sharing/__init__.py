"""
Plans what a prompt copies from stored prompts, and stores it afterwards: for serving, `explain` and replay.
"""
