"""
The suites: what is edited, moved or recomposed in each. One function makes the number-th draft of a suite from
the documents of one half; the same number is the same draft in every run.
"""
