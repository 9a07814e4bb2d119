"""User modeling at clients that have many users each: schools and regions."""
