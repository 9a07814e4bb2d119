"""Updates that travel from clients to the server, and their aggregation."""
