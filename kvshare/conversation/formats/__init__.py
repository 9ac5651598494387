"""How calls of tools are read from an answer's text: a module for each way in which models write them."""
