//! Why a rank cannot go on.

use std::path::PathBuf;

use bonfire_collectives::{CollectiveError, LaunchError, ProcessGroupError, StoreError};
use bonfire_placement::PlacementError;

/// An error of data-parallel training.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// The ranks could not do something together.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// The launch configuration does not say which rank this is.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// This process did not become a rank of a group.
    #[error(transparent)]
    ProcessGroup(#[from] ProcessGroupError),
    /// The ranks did not find each other, or are not of one run.
    #[error(transparent)]
    Store(#[from] StoreError),

    /// Ranks have built different models, or want to train them differently.
    #[error(
        "rank {rank} of {world_size}: {what} of rank {differing} is {given}, of rank 0 {expected}; \
         build the same model with the same settings on every rank"
    )]
    RanksDiffer {
        /// The rank that reports.
        rank: usize,
        /// The number of ranks in the group.
        world_size: usize,
        /// The lowest rank that differs from rank 0.
        differing: usize,
        /// What differs: a parameter, counted from 0 in the order of the model, or a setting.
        what: String,
        /// What that rank has.
        given: String,
        /// What rank 0 has.
        expected: String,
    },

    /// Models that were bitwise equal no longer are.
    #[error(
        "rank {rank} of {world_size}: after {num_windows} windows parameter {parameter} of ranks {drifted:?} is no \
         longer that of the others; update it on all ranks from the same gradients with the same optimizer"
    )]
    Drifted {
        /// The rank that reports.
        rank: usize,
        /// The number of ranks in the group.
        world_size: usize,
        /// How many windows had ended.
        num_windows: u64,
        /// The first parameter that differs.
        parameter: String,
        /// The ranks whose values are not those of most.
        drifted: Vec<usize>,
    },

    /// A weight is not a number that items can have.
    #[error("rank {rank}: a micro step cannot weigh {weight}; give its number of items, 0 or more and finite")]
    Weight {
        /// The rank that was given it.
        rank: usize,
        /// The weight.
        weight: f64,
    },

    /// Gradients belong to no parameter of the model that the step was made for.
    #[error(
        "rank {rank}: {num_unknown} gradients are not of the model's parameters, whose ids may have changed when a \
         record was loaded; call `synchronise` after loading"
    )]
    UnknownGradients {
        /// The rank that was given them.
        rank: usize,
        /// How many there are.
        num_unknown: usize,
    },

    /// A gradient does not fit its parameter.
    #[error("rank {rank}: the gradient of parameter {parameter} has {given} elements")]
    GradientShape {
        /// The rank that was given it.
        rank: usize,
        /// The parameter.
        parameter: String,
        /// The elements of the gradient.
        given: usize,
    },

    /// A gradient was handed over twice in one micro step.
    #[error(
        "rank {rank}: the gradient of {parameter} came twice during one backward pass; \
         a step with several backward passes must give its gradients afterwards"
    )]
    GradientTwice {
        /// The rank that was given it.
        rank: usize,
        /// The parameter.
        parameter: String,
    },

    /// A step gave other gradients than those that it handed over during backward.
    #[error(
        "rank {rank}: the step gives other gradients for {num_changed} parameters than its backward pass handed over, \
         as if it ran several or changed them; it did not before, so turn overlap off"
    )]
    OtherGradients {
        /// The rank whose step it is.
        rank: usize,
        /// How many parameters.
        num_changed: usize,
    },

    /// A call came while gradients of a window are on their way, or would be lost.
    #[error("rank {rank}: {call} in the middle of a window; finish it first")]
    WindowOpen {
        /// The rank that called.
        rank: usize,
        /// The call.
        call: &'static str,
    },

    /// A tensor could not be read from its device.
    #[error("cannot read parameter {parameter} from its device: {reason}")]
    Read {
        /// The parameter.
        parameter: String,
        /// What the backend said.
        reason: String,
    },

    /// The thread that reduces gradients panicked.
    #[error("rank {rank}: the thread that reduces gradients panicked: {reason}")]
    ReducerPanicked {
        /// The rank whose thread it is.
        rank: usize,
        /// What it said.
        reason: String,
    },

    /// The thread that reduces gradients could not be started.
    #[error("cannot start the thread that reduces gradients")]
    ReducerThread(#[source] std::io::Error),

    /// Ranks did not come together in a synchronised batch norm.
    #[error("SyncBatchNorm at {at}: {source}{}", advice_on_layers(source))]
    SyncBatchNorm {
        /// Which layer, and whether forward or backward.
        at: String,
        /// What the communicator said.
        #[source]
        source: CollectiveError,
    },

    /// Ranks came to different synchronised batch norms.
    #[error(
        "rank {rank} of {world_size}: SyncBatchNorm at {at}, while other ranks are at another layer or pass or have \
         ended theirs; all ranks must make the layers, and run them, in the same order"
    )]
    PlacesDiffer {
        /// The rank that reports.
        rank: usize,
        /// The number of ranks in the group.
        world_size: usize,
        /// Where it is.
        at: String,
    },

    /// A synchronised batch norm is trained with another backend than its group was made for.
    #[error("SyncBatchNorm of a group for {expected} was run with {given}; make it with `SyncGroup::new::<{given}>`")]
    SyncBackend {
        /// The group's backend.
        expected: &'static str,
        /// The model's.
        given: &'static str,
    },

    /// An argument of a sampler or loader cannot be.
    #[error("{argument} is {given}; {hint}")]
    Argument {
        /// Its name.
        argument: &'static str,
        /// Its value.
        given: String,
        /// What it may be.
        hint: String,
    },

    /// A batch cannot be shared out so.
    #[error(transparent)]
    Shares(PlacementError),

    /// A loader cannot go on where another run stopped.
    #[error("cannot resume the data: {reason}")]
    Resume {
        /// What does not fit.
        reason: String,
    },

    /// A loader of Burn's own was asked for what it cannot do.
    #[error("a plain Burn loader cannot do {asked}; build a `DistributedDataLoader` instead")]
    PlainLoader {
        /// What was asked.
        asked: String,
    },

    /// A configuration file cannot be used.
    #[error("cannot use {}: {problem}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },

    /// A setting of the learner does not go with data-parallel training.
    #[error("{problem}")]
    Setting {
        /// What is wrong, and what to do.
        problem: String,
    },

    /// What a rank's step gave cannot be joined with that of other ranks.
    #[error("the output of rank {rank} does not fit that of other ranks: of part {part}, {problem}")]
    Output {
        /// The rank.
        rank: usize,
        /// The part, counted from 0.
        part: usize,
        /// What is wrong with it.
        problem: String,
    },

    /// Something that cannot happen did.
    #[error("a bug of bonfire-train: {reason}")]
    Internal {
        /// What happened.
        reason: String,
    },
}

/// Where it is not a lost rank that kept ranks from coming together in synchronised layers.
fn advice_on_layers(source: &CollectiveError) -> &'static str {
    let cause = match source {
        CollectiveError::Broken { cause, .. } => cause,
        other => other,
    };
    match cause {
        CollectiveError::Timeout { .. } | CollectiveError::Mismatch { .. } => {
            "; all ranks must run the same layers forward and backward in the same order: one without items calls \
             `stand_in` (a DataParallel does with `with_sync_group`), and ranks that are threads call `align` after a \
             backward pass that comes between the forward and the backward pass of such layers"
        }
        _ => "",
    }
}
