"""A local page that shows runs while they train: it reads their files, and disturbs nothing."""
