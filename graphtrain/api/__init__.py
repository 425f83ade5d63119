"""Functions of `import graphtrain`: what each command does, as a function that returns its result.

The commands in graphtrain.cli call them. A module imports what is heavy inside its functions, so
that `import graphtrain` costs nothing.
"""
