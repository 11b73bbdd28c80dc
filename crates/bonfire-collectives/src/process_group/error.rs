//! What can go wrong before ranks are a group.

use std::time::Duration;

use crate::{CollectiveError, LaunchError, Refusal, StoreError};

/// Why a process did not become a rank of a group.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProcessGroupError {
    /// The process does not know its place.
    #[error(transparent)]
    Launch(#[from] LaunchError),

    /// The ranks did not meet at the store.
    #[error(transparent)]
    Store(#[from] StoreError),

    /// The first collective failed.
    #[error(transparent)]
    Collective(#[from] CollectiveError),

    /// No port can be opened for the other ranks.
    #[error("rank {rank} cannot listen at {address}: {reason}; it must be an address of this machine")]
    Listen {
        /// This rank.
        rank: usize,
        /// The address.
        address: String,
        /// What the system says.
        reason: String,
    },

    /// Ranks did not come in time.
    #[error(
        "rank {rank} of {world_size}: waited {waited:?} to connect group {name:?}; ranks {missing:?} did not come; \
         look there for the cause, or raise the timeout"
    )]
    Missing {
        /// The rank that waited.
        rank: usize,
        /// The number of ranks it expects.
        world_size: usize,
        /// The group.
        name: String,
        /// How long.
        waited: Duration,
        /// The ranks that did not come.
        missing: Vec<usize>,
    },

    /// A rank cannot be reached.
    #[error(
        "rank {rank} did not reach rank {other} at {address} within {waited:?} ({reason}); \
         that rank's option host must be an address that this machine reaches, and no firewall between"
    )]
    Connect {
        /// This rank.
        rank: usize,
        /// The other rank.
        other: usize,
        /// Where.
        address: String,
        /// How long.
        waited: Duration,
        /// How the last try failed.
        reason: String,
    },

    /// What listens there does not let this rank in.
    #[error("rank {rank} was turned away by rank {other} at {address}: {refusal}")]
    Refused {
        /// This rank.
        rank: usize,
        /// The other rank.
        other: usize,
        /// Where.
        address: String,
        /// Why.
        refusal: Refusal,
    },

    /// The name of a group was used before.
    #[error("rank {rank}: a group named {name:?} was made before; give each group a name of its own")]
    NameTaken {
        /// This rank.
        rank: usize,
        /// The name.
        name: String,
    },

    /// The backend cannot be used.
    #[error("rank {rank} cannot use the backend {backend}: {reason}")]
    Unavailable {
        /// This rank.
        rank: usize,
        /// The backend.
        backend: &'static str,
        /// Why, and what to do.
        reason: String,
    },
}
