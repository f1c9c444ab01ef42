"""Reading cubins: ELF structure, the exported kernel contract, and the set of installed cubins."""
