"""Files of data: fetching them, and formats that no library reads safely."""
