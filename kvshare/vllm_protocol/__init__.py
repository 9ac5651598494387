"""What proxy and connector say to each other: tickets, events, salts, versions. No HTTP, no vLLM."""
