//! Ranks, and the operations they do together: every rank calls, all wait for each other, all get the result.
//!
//! ```text
//! call -> check own arguments -> deposit -> all there? compare -> commit -> work -> leave
//!              |                    |              |                |
//!         own error            Timeout,         Mismatch        no error past here: ranks that read
//!      breaks the group    RankEnded, Aborted   on every rank   each other's buffers stay together
//! ```
//!
//! A [`Communicator`] is one rank's end of a group. [`ThreadCommunicator`] makes threads of this process
//! ranks, which read each other's memory; [`ExchangeCommunicator`] connects ranks that share none, by any [`Transport`];
//! [`Counting`] wraps any communicator and counts what goes through.
//! Results are formed in rank order: the same bits on every rank and in every run. After an error a group is
//! broken for good, and every call says why ([`CollectiveError`]).
//!
//! ```
//! use std::{num::NonZeroUsize, time::Duration};
//!
//! use bonfire_collectives::{BufferMut, Collective, CollectiveError, Communicator, Counting, ReduceOp, run_ranks};
//!
//! let world_size = NonZeroUsize::new(2).unwrap();
//! let results = run_ranks(world_size, Duration::from_secs(10), |communicator| {
//!     let communicator = Counting::new(communicator);
//!     // Each rank has a gradient of its own ...
//!     let mut gradient = vec![communicator.rank() as f32, 10.0];
//!     communicator.all_reduce(BufferMut::from_slice(&mut gradient), ReduceOp::Mean)?;
//!     // ... and one collective later all have the mean.
//!     assert_eq!(communicator.counts().tally().to_string(), "1 all_reduce (8 bytes)");
//!     Ok::<_, CollectiveError>(gradient)
//! });
//! for gradient in results {
//!     assert_eq!(gradient, Ok(vec![0.5, 10.0]));
//! }
//! ```
//!
//! A [`ProcessGroup`] is all of that for a process that mpirun, srun or torchrun has started, or nobody:
//! `ProcessGroup::from_env()`. Before it is there, processes find each other: [`LaunchConfig`] says which rank a process is, by explicit options or by what
//! torchrun, Open MPI or Slurm left in the environment; a [`Store`] has small values for all ranks, in memory or hosted by
//! rank 0 over TCP; and a [`rendezvous`] makes sure that they are of one run.
//!
//! # Feature flags
//!
//! - `mpi`: ranks that mpirun has started talk over MPI; needs an MPI library and libclang to build.
//! - `serde`: [`LaunchOptions`] and [`ProcessGroupOptions`] can be read and written.

mod broken;
mod buffer;
mod call;
mod communicator;
#[doc(hidden)]
pub mod conformance;
mod counting;
mod cursor;
mod dtype;
mod error;
mod exchange;
mod fingerprint;
mod launch;
#[cfg(feature = "mpi")]
mod mpi;
mod operation;
mod process_group;
mod ranks;
mod reduce;
mod rendezvous;
mod share;
mod store;
mod tcp;
mod thread;
mod transport;

pub use buffer::{Buffer, BufferMut};
pub use communicator::Communicator;
pub use counting::{Counting, Counts, Tally};
pub use dtype::{DType, Element};
pub use error::CollectiveError;
pub use exchange::ExchangeCommunicator;
pub use launch::{LaunchConfig, LaunchEnvironment, LaunchError, LaunchOptions, Launcher, Token};
#[cfg(feature = "mpi")]
pub use mpi::{MpiCommunicator, MpiTransport, MpiWorld};
pub use operation::{Collective, ReduceOp};
pub use process_group::{GroupBackend, ProcessGroup, ProcessGroupError, ProcessGroupOptions};
pub use ranks::{run_groups, run_ranks};
pub use rendezvous::{Configuration, Meeting, rendezvous};
pub use store::{
    MAX_KEY_BYTES, MAX_STORE_BYTES, MAX_VALUE_BYTES, MAX_WAIT_KEYS, MemoryStore, Refusal, Store, StoreError, TcpStore,
};
pub use tcp::{TcpCommunicator, TcpTransport};
pub use thread::ThreadCommunicator;
pub use transport::{Incoming, MAX_NOTICE_BYTES, Outgoing, Transport, TransportError, Watch};
