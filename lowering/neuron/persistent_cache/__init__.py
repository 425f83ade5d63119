"""The Neuron persistent cache: the directory that AWS's tools fill, and that JAX and PyTorch load
from on a Neuron machine.

    ROOT/neuronxcc-<version>/MODULE_<hlo key>+<flags key>/model.hlo_module.pb   the program
                                                          compile_flags.json    the compiler's flags
                                                          model.neff            what it made of them
                                                          model.done            empty; written last
                                                          model.log             why it refused them
                                                          *.lock                somebody compiles it

The key of a program is made inside AWS's plugin and cannot be computed elsewhere: entries are
finished here, never named. Imports nothing beyond `lowering`.
"""
