"""Variables that real launchers set, recorded on two hosts: Open MPI 4.1.4, MPICH 4.0.2, Slurm 22.05.8, torch 2.13."""


def _variables(text: str) -> dict[str, str]:
    return dict(each.split("=", 1) for each in text.split())


DEEPSPEED = _variables("""
    RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_SIZE=4 CROSS_RANK=1 CROSS_SIZE=2 MASTER_ADDR=10.88.0.1 MASTER_PORT=29500
""")

TORCHRUN = _variables("""
    RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2 ROLE_RANK=5
    ROLE_WORLD_SIZE=8 MASTER_ADDR=10.88.0.1 MASTER_PORT=29400
""")

# `mpirun -np 3` over two hosts of one and two slots, also by `deepspeed --launcher openmpi`.
OPEN_MPI = _variables("""
    OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_NODE_RANK=1 OMPI_COMM_WORLD_RANK=2
    OMPI_COMM_WORLD_SIZE=3 OMPI_MCA_ess_base_jobid=2368995329
    OMPI_MCA_orte_hnp_uri=2368995328.0;tcp://10.88.0.1:60417
    OMPI_MCA_orte_local_daemon_uri=2368995328.1;tcp://10.88.0.2:59241 OMPI_MCA_orte_num_nodes=2 PMIX_HOSTNAME=host2
    PMIX_RANK=2
""")

# The first rank, which mpirun started on its own host.
OPEN_MPI_FIRST = OPEN_MPI | _variables("""
    OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1 OMPI_COMM_WORLD_NODE_RANK=0 OMPI_COMM_WORLD_RANK=0
    OMPI_MCA_orte_local_daemon_uri=2368995328.0;tcp://10.88.0.1:60417 PMIX_HOSTNAME=host1 PMIX_RANK=0
""")

# `mpirun -np 2` on one host with several addresses.
OPEN_MPI_ONE_HOST = _variables("""
    OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2
    OMPI_MCA_ess_base_jobid=497745921 OMPI_MCA_orte_hnp_uri=497745920.0;tcp://192.0.2.2:38193;tcp6://[fd00::2]:43879
    OMPI_MCA_orte_local_daemon_uri=497745920.0;tcp://192.0.2.2:38193;tcp6://[fd00::2]:43879
""")

# `mpiexec.hydra -n 2`, without hosts.
MPICH = _variables("""
    MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1 PMI_FD=8 PMI_RANK=1 PMI_SIZE=2
""")

# `srun -N2 -n3`, also by `deepspeed --launcher slurm`.
SLURM = _variables("""
    SLURM_GTIDS=2 SLURM_JOB_ID=1 SLURM_JOB_NODELIST=tslice-29807-1-host[1-2] SLURM_LAUNCH_NODE_IPADDR=10.88.0.1
    SLURM_LOCALID=0 SLURM_NNODES=2 SLURM_NODEID=1 SLURM_NODELIST=tslice-29807-1-host[1-2] SLURM_NPROCS=3
    SLURM_NTASKS=3 SLURM_PROCID=2 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=tslice-29807-1-host[1-2]
    SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=2,1 SLURM_TASKS_PER_NODE=2,1
""")

# The script of `sbatch -N2 --ntasks-per-node=2`, before any srun in it.
BATCH_SCRIPT = _variables("""
    SLURM_GTIDS=0 SLURM_JOB_ID=2 SLURM_JOB_NODELIST=tslice-29807-1-host[1-2] SLURM_LOCALID=0 SLURM_NNODES=2
    SLURM_NODEID=0 SLURM_NTASKS=4 SLURM_NTASKS_PER_NODE=2 SLURM_PROCID=0 SLURM_TASKS_PER_NODE=2(x2)
""")

# `mpirun` in that script: rank 3 sees the task of srun in which mpirun's daemon of the second node runs.
OPEN_MPI_IN_SLURM = _variables("""
    OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4
    OMPI_MCA_ess_base_jobid=2178154497 OMPI_MCA_orte_hnp_uri=2178154496.0;tcp://10.88.0.1:35941
    OMPI_MCA_orte_local_daemon_uri=2178154496.1;tcp://10.88.0.2:58331 PMIX_RANK=3 SLURM_JOB_ID=2 SLURM_LOCALID=0
    SLURM_NODEID=0 SLURM_NTASKS=1 SLURM_NTASKS_PER_NODE=1 SLURM_PROCID=0 SLURM_STEP_ID=2
    SLURM_STEP_NODELIST=tslice-29807-1-host2 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1
""")
