"""A run that is prepared but for its data: tests feed micro-batches of their own."""

from deepspeed_ext.runtime.launch import LaunchEnvironment
from megatron_terapipe.checkpoint.verify import find_checkpoint
from megatron_terapipe.config import Config
from megatron_terapipe.data.tokenizer import ByteTokenizer
from megatron_terapipe.training.run import Run


def prepared_run(config: Config) -> Run:
    """Return this rank's run of a configuration."""
    launch = LaunchEnvironment.read()
    layout = config.parallel.layout(launch.world_size)
    return Run(
        config=config,
        launch=launch,
        layout=layout,
        tokenizer=ByteTokenizer(),
        checkpoint=find_checkpoint(config.checkpoint, config.model, layout, config.optimizer.optimizer),
    )
