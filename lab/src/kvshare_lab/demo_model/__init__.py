"""
The forms and questions that the forms model was trained on; lab/scripts train and evaluate it.

    sheets.py   filled-in forms and edits of them
    pairs.py    questions about them, right answers, near-duplicate requests
    export.py   the forms model with wider heads, for vLLM on a CPU
"""
