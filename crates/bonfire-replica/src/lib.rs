//! `Replica<B>`: a Burn backend over several devices of another backend `B`.
//!
//! ```text
//! op -> all inputs at home? run it here
//!    -> else: rule -> placements -> redistribute inputs -> one task per member -> outputs with their placements
//!                                   `----------- in one order for all members -----------'
//! ```
//!
//! A tensor has one shape, one dtype and a [placement](bonfire_placement::Placement). Fresh tensors stay on the home
//! device, where operations run on the calling thread as they would without a replica; the first operation heavy
//! enough to be worth sharing (linear, matmul, convolution, embedding) spreads them over the members. Each member has
//! a thread, a bounded queue, a share of the cores and a rank in an in-process communicator.
//!
//! | file | what it holds |
//! |---|---|
//! | `backend` | the type [`Replica`] |
//! | `device`, `options` | [`ReplicaDevice`], its settings and the environment |
//! | `tensor`, `value` | a tensor, its placement and its parts |
//! | `ops` | Burn's operation traits: each method names its op family |
//! | `execute`, `operands` | one operation: at home, or planned and enqueued; what goes in and comes out |
//! | `expand` | tensors that are stored smaller than they are |
//! | `redistribute`, `read`, `transfer` | from one placement to another, to the host, to another device |
//! | `group` | members, queues, order, failure |
//! | `balance` | shares that change between steps |
//! | `random` | draws that any member can make its part of |
//! | `pending` | sums that are not formed yet |
//! | `member` | what a backend does to be a member |
//! | `distributed` | where Burn's own data parallelism is turned on, behind a feature |
//! | `memory` | what members hold, by kind |
//! | `ir` | handles of Burn's intermediate representation, behind a feature |
//!
//! # Feature flags
//!
//! - `distributed`: [`Replica`] is a `DistributedBackend`, as `Autodiff` demands where Burn's feature of this name is on.
//! - `ir`: [`Replica`] is a `BackendIr`: a server can offer it to another process, a router can hold it.
//! - `ndarray`: `burn-ndarray` devices as members.
//! - `serde`: [`ReplicaOptions`], [`ShareSchedule`], [`RandomState`] and [`MemoryReport`] can be read and written.
//! - `wgpu`: WGPU devices as members, without Burn's fusion.

#![forbid(unsafe_code)]

mod allocator;
mod backend;
mod balance;
mod device;
#[cfg(feature = "distributed")]
mod distributed;
mod error;
mod execute;
mod expand;
mod gradients;
mod group;
#[cfg(feature = "ir")]
mod ir;
mod member;
mod memory;
mod operands;
mod ops;
mod options;
mod pending;
mod random;
mod read;
mod redistribute;
mod tensor;
mod transfer;
pub mod value;

pub use backend::Replica;
pub use bonfire_placement::{Lengths, Placement, ShareChange, ShareSchedule, Shares};
pub use device::ReplicaDevice;
pub use error::ReplicaError;
pub use member::{Member, MemberCommunicator};
pub use memory::{Buffer, BytesByKind, HomeMemory, MemberMemory, MemoryReport};
pub use options::{Balance, Environment, RandomMode, ReplicaOptions, Spread};
pub use random::RandomState;
pub use tensor::ReplicaTensor;
