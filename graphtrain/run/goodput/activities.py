"""Activities of a process that trains, and the buckets of wall time into which they are counted.

The buckets have the names of ml-goodput-measurement 0.2, so that figures can be compared.
"""

from graphtrain.run import stalls

START = "start"  # of the process: imports, and checks of the configuration
JOIN = "join"  # waits for the other processes
COMPILE = "compile"  # compiles missing programs, or fetches them
PREPARE = "prepare"  # opens the run directory, weights and programs
DEVICES = "devices"  # initializes the devices
LOAD = "load"  # loads the executables
INITIALIZE = "initialize"  # computes or reads the initial weights
RESTORE = "restore"
OPEN_DATA = "open_data"
FIRST_STEP = "first_step"  # up to its end
STEP = "step"  # all others
SAVE = "save"  # the training loop waits for a checkpoint
EVALUATE = "evaluate"  # also samples and scores on tasks
STOP = "stop"

PRODUCTIVE = "step"
LOADING = "data_loading"
STARTUP = "program_startup"
WASTED = "wasted_progress"
RECOVERY = "infrastructure_recovery"
UNRECORDED = "unrecorded"

# Buckets in the order of a table, with their meaning; docs/reference/metrics.md is made from it.
BUCKETS = {
    PRODUCTIVE: "productive: steps whose result was kept",
    "accelerator_init": "waiting for the other processes, and initialization of the devices",
    "training_preparation": "process start, imports, checks, initial weights, end of the process",
    STARTUP: "loading the executables; the first step, as far as it exceeds a mean one; "
    "with run --compile, compiling",
    LOADING: "opening the data, and waiting for a batch while no step computes (an estimate)",
    "checkpoint_save": "the training loop waits for a checkpoint, or at the end for its upload",
    "checkpoint_restore": "loading the checkpoint, and downloading it",
    "evaluation": "evaluations, samples, scores on tasks",
    WASTED: "steps that a later process ran again, because no checkpoint had them",
    RECOVERY: "between the end of a process and the start of the next one",
    UNRECORDED: "lines of goodput.jsonl that are lost or damaged",
}
BUCKET_OF_ACTIVITY = {
    START: "training_preparation",
    JOIN: "accelerator_init",
    COMPILE: STARTUP,
    PREPARE: "training_preparation",
    DEVICES: "accelerator_init",
    LOAD: STARTUP,
    INITIALIZE: "training_preparation",
    RESTORE: "checkpoint_restore",
    OPEN_DATA: LOADING,
    FIRST_STEP: PRODUCTIVE,
    STEP: PRODUCTIVE,
    SAVE: "checkpoint_save",
    EVALUATE: "evaluation",
    STOP: "training_preparation",
}
# Activities of the training loop, by what it tells the watchdog.
ACTIVITY_OF_STAGE = {
    stalls.LOADING: LOAD,  # of a later phase of the program
    stalls.DATA: STEP,
    stalls.COMPUTING: STEP,
    stalls.EVALUATING: EVALUATE,
    stalls.SAMPLING: EVALUATE,
    stalls.SCORING: EVALUATE,
    stalls.SAVING: SAVE,
}
