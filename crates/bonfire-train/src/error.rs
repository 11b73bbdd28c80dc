//! Why a rank cannot go on.

use bonfire_collectives::{CollectiveError, LaunchError, StoreError};

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
    /// The ranks did not find each other, or are not of one run.
    #[error(transparent)]
    Store(#[from] StoreError),
}
