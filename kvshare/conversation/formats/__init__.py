"""Reads tool calls from the text of an answer: one module for each format in which models write them."""
