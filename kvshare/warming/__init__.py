"""`kvshare warm`: documents and prompts are computed and stored before the first user asks for them."""
