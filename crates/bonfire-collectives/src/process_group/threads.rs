//! Groups whose ranks are threads of one process.

use std::{
    collections::HashMap,
    num::NonZeroUsize,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use super::{ProcessGroup, ProcessGroupError};
use crate::{MemoryStore, ThreadCommunicator};

/// What the ranks of one run share: their store, and groups of communicators by name.
pub(super) struct ThreadGroups {
    world_size: NonZeroUsize,
    timeout: Duration,
    /// Whoever comes first to a name makes the communicators of all ranks.
    named: Mutex<HashMap<String, Vec<Option<ThreadCommunicator>>>>,
}

impl ThreadGroups {
    /// This rank's communicator of the group of a name; it can be taken once.
    pub(super) fn take(&self, rank: usize, name: &str) -> Result<ThreadCommunicator, ProcessGroupError> {
        let mut named = self.named.lock().unwrap_or_else(PoisonError::into_inner);
        let make = || ThreadCommunicator::group(self.world_size, self.timeout).into_iter().map(Some).collect();
        let group = named.entry(name.to_owned()).or_insert_with(make);
        group[rank].take().ok_or_else(|| ProcessGroupError::NameTaken { rank, name: name.to_owned() })
    }
}

/// The process groups of threads that are ranks, by rank, given the communicators of their main group.
pub(crate) fn groups(communicators: Vec<ThreadCommunicator>, timeout: Duration) -> Vec<ProcessGroup> {
    let Some(world_size) = NonZeroUsize::new(communicators.len()) else { return Vec::new() };
    let shared = Arc::new(ThreadGroups { world_size, timeout, named: Mutex::default() });
    let store = MemoryStore::new();
    let group = |(rank, communicator): (usize, ThreadCommunicator)| {
        ProcessGroup::of_thread(rank, world_size, Arc::new(communicator), Arc::new(store.clone()), shared.clone())
    };
    communicators.into_iter().enumerate().map(group).collect()
}
