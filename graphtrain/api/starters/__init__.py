"""Starting points: prepared data and a short configuration file for a new project."""
