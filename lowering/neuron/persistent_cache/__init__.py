"""Neuron persistent cache: the directory from which JAX and PyTorch on Neuron load NEFFs.

AWS's tools fill it:

    ROOT/neuronxcc-<version>/MODULE_<hlo key>+<flags key>/model.hlo_module.pb   the program
                                                          compile_flags.json    the compiler's flags
                                                          model.neff            the compiled program
                                                          model.done            empty; written last
                                                          model.log             why it was rejected
                                                          *.lock                being compiled

The key of a program is computed inside AWS's plugin and cannot be computed elsewhere: this package
completes existing entries and never creates one. Imports nothing beyond `lowering`.
"""
