"""File formats that no library reads safely."""
