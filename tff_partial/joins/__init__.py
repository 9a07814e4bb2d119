"""How what clients send is joined at the server, besides means and sums."""
