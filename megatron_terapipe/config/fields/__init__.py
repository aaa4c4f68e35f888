"""Fields of the sections: what each gives to its flag, and the names of files and hosts that their values are."""
