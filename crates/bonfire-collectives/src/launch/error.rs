//! What can be wrong with options and variables.

use super::Launcher;

/// Why a process does not know its place in a run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// A value that cannot be read, or makes no sense.
    #[error("{name} is {value:?}, must be {expected}; correct it, or unset it to have its default")]
    Value {
        /// The variable, or the option.
        name: &'static str,
        /// What it says.
        value: String,
        /// What it could say.
        expected: &'static str,
    },

    /// One of variables that only make sense together is missing.
    #[error("{set} is {value:?} but {missing} is not set; set it too, or unset {set} to run as a single process")]
    Incomplete {
        /// What is set.
        set: &'static str,
        /// What it says.
        value: String,
        /// What is missing.
        missing: &'static str,
    },

    /// Two variables say different things of one fact.
    #[error(
        "{variable} is {value} but {launcher_variable} is {launcher_value}; \
         unset {variable} to go by the launcher, or give explicit options"
    )]
    Contradiction {
        /// The variable set by hand.
        variable: &'static str,
        /// What it says.
        value: usize,
        /// The launcher's variable.
        launcher_variable: &'static str,
        /// What it says.
        launcher_value: usize,
    },

    /// A rank that the run does not have.
    #[error(
        "{name} is {value}, must be below {world_size} ({world_size_name}): \
         ranks count from 0; correct one of the two"
    )]
    OutOfRange {
        /// The variable, or the option.
        name: &'static str,
        /// Its value.
        value: usize,
        /// The number of ranks.
        world_size: usize,
        /// The variable, or the option, that gives their number.
        world_size_name: &'static str,
    },

    /// Several ranks, and nothing says where they meet.
    #[error(
        "{world_size} ranks ({launcher}) need the {missing} of rank 0: set {} on all of them, or the option {missing}",
        if *.missing == "port" { "MASTER_PORT" } else { "MASTER_ADDR" }
    )]
    NoMeetingPoint {
        /// Who launched.
        launcher: Launcher,
        /// The number of ranks.
        world_size: usize,
        /// `address` or `port`.
        missing: &'static str,
    },

    /// A Slurm job of several tasks whose batch script runs the program itself, once.
    #[error(
        "SLURM_NTASKS is {num_tasks} but SLURM_STEP_ID is not set: the batch script runs this program alone; \
         start it with srun, or set the option world_size to 1 and the options rank and local_rank to 0"
    )]
    NotAStep {
        /// What `SLURM_NTASKS` says.
        num_tasks: usize,
    },
}
