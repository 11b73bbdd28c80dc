//! Which items each rank sees, in which order, and the loaders that bring them.
//!
//! ```text
//! (seed, epoch) -> order of the dataset -> windows -> global micro batches -> this rank's share -> batch
//! sampler.rs                                                                 loader.rs
//! ```

mod handle;
mod loader;
mod plain;
mod sampler;

pub use handle::LoaderHandle;
pub use loader::{DistributedDataLoader, DistributedDataLoaderBuilder};
pub use plain::{PlainBatches, PlainShare, batch_aligned_slice};
pub use sampler::{MicroStep, Sampler, SamplerEpoch, SamplerOptions, SamplerState, Tail, WindowPlan};
