"""What proxy and connector exchange: tickets, events, salts, versions. Imports neither HTTP nor vLLM."""
