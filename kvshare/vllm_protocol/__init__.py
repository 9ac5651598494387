"""The protocol of proxy and connector: tickets, events, salts, versions. Imports neither HTTP nor vLLM."""
