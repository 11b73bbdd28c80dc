//! MPI as this process has started it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use mpi::{
    Threading,
    environment::{self, Universe},
};

use super::raw::Comm;
use crate::ProcessGroupError;

/// All processes that mpirun has started together. Clones share it; MPI ends with the last one, and cannot start again.
///
/// It ends in `MPI_Finalize`, which waits for all other processes and which MPI wants on the thread that started it: keep
/// a clone there until all others are gone. A process that gives up must end with another status than 0 instead
/// (`std::process::exit`): mpirun then ends the others.
#[derive(Clone)]
pub struct MpiWorld {
    shared: Arc<Shared>,
}

struct Shared {
    rank: usize,
    world_size: usize,
    /// Where the library wants calls one at a time.
    one_at_a_time: Option<Mutex<()>>,
    /// None if somebody else has started MPI, and will end it.
    _universe: Option<Universe>,
}

static CURRENT: Mutex<Weak<Shared>> = Mutex::new(Weak::new());

impl MpiWorld {
    /// Starts MPI, unless this process has started it before.
    ///
    /// # Errors
    ///
    /// [`ProcessGroupError::Unavailable`] if MPI has ended in this process, or does not take calls from several threads.
    pub fn join() -> Result<Self, ProcessGroupError> {
        let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(shared) = current.upgrade() {
            return Ok(Self { shared });
        }
        let unavailable = |rank, reason: String| ProcessGroupError::Unavailable { rank, backend: "mpi", reason };
        if environment::is_finalized() {
            return Err(unavailable(0, "MPI has ended in this process, and starts only once; keep a group".into()));
        }
        let (universe, threading) = match environment::initialize_with_threading(Threading::Multiple) {
            Some((universe, threading)) => (Some(universe), threading),
            None => (None, environment::threading_support()),
        };
        let comm = Comm::world();
        let rank = comm.rank().map_err(|reason| unavailable(0, reason))?;
        let world_size = comm.size().map_err(|reason| unavailable(rank, reason))?;
        if threading < Threading::Serialized {
            let reason = format!("it was started for one thread ({threading:?}); start it with MPI_THREAD_MULTIPLE");
            return Err(unavailable(rank, reason));
        }
        let one_at_a_time = (threading < Threading::Multiple).then(Mutex::default);
        let shared = Arc::new(Shared { rank, world_size, one_at_a_time, _universe: universe });
        *current = Arc::downgrade(&shared);
        Ok(Self { shared })
    }

    /// This process among all.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.shared.rank
    }

    /// The number of processes.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.shared.world_size
    }

    /// To hold while MPI is called.
    pub(super) fn lock(&self) -> Option<MutexGuard<'_, ()>> {
        let lock = self.shared.one_at_a_time.as_ref()?;
        Some(lock.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
