//! Why a group is broken, and what each rank is told about it.

use std::{sync::Arc, time::Duration};

use crate::{CollectiveError, call::Call};

/// Why a group is broken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Break {
    pub(crate) cause: Arc<CollectiveError>,
    /// The ranks that were in the round that failed: they get the cause as their own.
    pub(crate) concerned: Vec<usize>,
}

impl Break {
    /// The error of a rank that waited when the group broke.
    pub(crate) fn explain(&self, call: Call, waited: Duration) -> CollectiveError {
        if !self.concerned.contains(&call.rank) {
            return self.refuse(call);
        }
        let mut own = CollectiveError::clone(&self.cause);
        match &mut own {
            CollectiveError::Timeout { rank, collective, waited: own_wait, .. } => {
                (*rank, *collective, *own_wait) = (call.rank, call.collective, waited);
            }
            CollectiveError::Mismatch { rank, collective, .. } => {
                (*rank, *collective) = (call.rank, call.collective);
            }
            // Only the two above concern the ranks of a round.
            _ => return self.refuse(call),
        }
        own
    }

    /// The error of a call on a broken group.
    pub(crate) fn refuse(&self, call: Call) -> CollectiveError {
        let Call { rank, world_size, collective } = call;
        CollectiveError::Broken { rank, world_size, collective, cause: self.cause.clone() }
    }
}
