//! Data-parallel training: each rank trains a copy of the model on its share of each batch, and all stay bitwise equal.
//!
//! ```text
//! batch -> split -> forward/backward -> accumulate -> bucket -> all-reduce -> clip -> optimizer
//! data/             step.rs             window.rs     bucket.rs  reducer.rs
//! ```

#![forbid(unsafe_code)]

mod accumulator;
mod bucket;
mod buffers;
mod clip;
mod config;
mod consistency;
mod data;
mod error;
mod gather;
mod hooks;
mod overlap;
mod parameters;
mod random;
mod reducer;
mod step;
mod strategy;
mod sync_batch_norm;
mod window;
mod wire;

pub use accumulator::GradientSink;
pub use buffers::{BufferSync, synchronise_buffers};
pub use clip::clip_by_global_norm;
pub use config::{DataParallelConfig, RankBalance};
pub use consistency::check_consistency;
pub use data::{
    DistributedDataLoader, DistributedDataLoaderBuilder, LoaderHandle, MicroStep, PlainBatches, PlainShare, Sampler,
    SamplerEpoch, SamplerOptions, SamplerState, Tail, WindowPlan, batch_aligned_slice,
};
pub use error::TrainError;
pub use gather::{GatherOutput, OutputPart};
pub use hooks::{AnyHooks, BackwardFn, HookBackend, HookReport, HookedModel, Hooks};
pub use overlap::Overlap;
pub use parameters::{Parameter, broadcast_parameters, compare_parameters, parameters};
pub use random::RankSeed;
pub use step::{SyncOptions, TrainingStep, Window};
pub use strategy::{DataParallel, DataParallelTraining};
pub use sync_batch_norm::{LossWeight, SyncBatchNorm, SyncGroup};
pub use window::Reduction;
pub use wire::ReduceDType;
