"""Print the variables of CUDA of one rank, after the trainer has prepared them: a line of JSON.

A second line is the mark of its launch. The variables that DeepSpeed's launcher exports depend on no device.
"""

import json
import os

from deepspeed_ext.runtime.cuda_environment import compared_variables, prepare_cuda_environment
from megatron_terapipe.launch.supervisor import VARIABLE

if __name__ == "__main__":
    variables = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    prepare_cuda_environment(variables, num_pipeline_ranks=2, has_device=True)
    print("variables", json.dumps(compared_variables(variables)), flush=True)
    print("mark", os.environ.get(VARIABLE), flush=True)
