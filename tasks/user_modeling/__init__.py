"""User modeling at clients with many users each: schools and regions."""
