"""Is a server of the OpenAI protocol well? It is asked, and what it says is read."""
