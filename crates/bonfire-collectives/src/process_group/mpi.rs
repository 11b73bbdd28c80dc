//! Groups of processes that mpirun has started.

use std::{
    num::NonZeroUsize,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{ProcessGroupError, ProcessGroupOptions};
use crate::{Communicator, LaunchConfig, MpiCommunicator, MpiTransport, MpiWorld, Store, StoreError};

/// What every MPI group of this process needs.
pub(super) struct Mpi {
    world: MpiWorld,
    world_size: NonZeroUsize,
    timeout: Duration,
    rendezvous_timeout: Duration,
    native_sum: bool,
}

impl Mpi {
    pub(super) fn new(config: &LaunchConfig, options: &ProcessGroupOptions) -> Result<Self, ProcessGroupError> {
        let world = MpiWorld::join()?;
        let (rank, world_size) = (config.rank(), config.world_size());
        if (world.rank(), world.world_size()) != (rank, world_size.get()) {
            let reason = format!(
                "to MPI this is rank {} of {}, to the options or the environment rank {rank} of {world_size}; \
                 start it with mpirun and unset the other, or choose tcp",
                world.rank(),
                world.world_size(),
            );
            return Err(ProcessGroupError::Unavailable { rank, backend: "mpi", reason });
        }
        let (timeout, rendezvous_timeout, native_sum) =
            (options.timeout, options.rendezvous_timeout, options.native_sum);
        Ok(Self { world, world_size, timeout, rendezvous_timeout, native_sum })
    }

    pub(super) fn communicator(
        &self,
        store: &dyn Store,
        name: &str,
    ) -> Result<Arc<dyn Communicator>, ProcessGroupError> {
        self.meet(store, name)?;
        let transport = MpiTransport::new(&self.world, name)?.with_native_sum(self.native_sum);
        Ok(Arc::new(MpiCommunicator::new(transport, self.timeout)))
    }

    /// Waits until all ranks want this communicator: MPI itself would wait without end.
    fn meet(&self, store: &dyn Store, name: &str) -> Result<(), ProcessGroupError> {
        let (rank, started) = (self.world.rank(), Instant::now());
        let key = |rank| format!("mpi/{name}/{rank}");
        if store.add(&key(rank), 1)? > 1 {
            return Err(ProcessGroupError::NameTaken { rank, name: name.to_owned() });
        }
        let keys: Vec<String> = (0..self.world_size.get()).map(key).collect();
        let names: Vec<&str> = keys.iter().map(String::as_str).collect();
        store.wait(&names, self.rendezvous_timeout).map_err(|error| match error {
            StoreError::Timeout { keys: missing, .. } => ProcessGroupError::Missing {
                rank,
                world_size: self.world_size.get(),
                name: name.to_owned(),
                waited: started.elapsed(),
                missing: (0..keys.len()).filter(|&rank| missing.contains(&keys[rank])).collect(),
            },
            other => other.into(),
        })
    }
}
