"""Downloads, and file formats that no library reads safely."""
