//! What can go wrong with a group of members, in words that say what to do.

use std::time::Duration;

use bonfire_collectives::CollectiveError;
use bonfire_placement::PlacementError;

/// An error of a [`ReplicaDevice`](crate::ReplicaDevice) or of the members behind it.
///
/// Messages are complete in themselves, causes included: they reach users as the text of a panic or of Burn's
/// `ExecutionError`. Once a group of members is broken its first cause is kept, and every later operation reports that cause.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplicaError {
    /// A group needs at least one device.
    #[error(
        "a replica needs at least one member device, none was given; list one device per member, or use ReplicaDevice::default()"
    )]
    NoMembers,
    /// More members than a process can have threads for.
    #[error("{num_members} members are too many, at most {limit}: one per device, or per core of a CPU")]
    TooManyMembers {
        /// What was asked for.
        num_members: usize,
        /// The most there can be.
        limit: usize,
    },
    /// More groups were made than device ids exist.
    #[error(
        "this process has made {limit} replica devices, the most that device ids can tell apart; keep one device and clone it"
    )]
    TooManyGroups {
        /// The number of ids.
        limit: usize,
    },
    /// The shares do not fit the members.
    #[error("the shares do not fit {num_members} members: {reason}")]
    Shares {
        /// Members of the group.
        num_members: usize,
        /// What is wrong with them.
        reason: PlacementError,
    },
    /// An option is out of its range.
    #[error("replica option {option} is {value}: {expected}")]
    Option {
        /// Name of the field.
        option: &'static str,
        /// What was given.
        value: String,
        /// What is accepted.
        expected: &'static str,
    },
    /// An environment variable cannot be read.
    #[error("environment variable {variable} is \"{value}\": expected {expected}")]
    Environment {
        /// Its name.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What is accepted.
        expected: &'static str,
    },
    /// A member's thread could not be started.
    #[error("member {member} of {num_members}: cannot start its thread: {reason}; lower the number of members")]
    Start {
        /// Index of the member.
        member: usize,
        /// Members of the group.
        num_members: usize,
        /// The operating system's reason.
        reason: String,
    },
    /// An operation panicked on a member.
    #[error(
        "member {member} of {num_members} failed in {operation}: {message} (the replica is broken for good: make a new one with ReplicaDevice::default() or ReplicaDevice::new)"
    )]
    Panicked {
        /// Index of the member.
        member: usize,
        /// Members of the group.
        num_members: usize,
        /// The operation it ran.
        operation: &'static str,
        /// What the panic said.
        message: String,
    },
    /// A collective among the members failed.
    #[error(
        "member {member} of {num_members} failed in {operation}: {reason} (the replica is broken for good: make a new one)"
    )]
    Collective {
        /// Index of the member that saw it first.
        member: usize,
        /// Members of the group.
        num_members: usize,
        /// The operation it ran.
        operation: &'static str,
        /// The collective's own error.
        reason: CollectiveError,
    },
    /// A member made no progress for the whole timeout.
    #[error(
        "waited {waited:?} for member {member} of {num_members}, which is in {operation}: no operation ended in that time; raise ReplicaOptions::timeout if one may take so long"
    )]
    Timeout {
        /// Index of the member.
        member: usize,
        /// Members of the group.
        num_members: usize,
        /// What it runs.
        operation: &'static str,
        /// How long nothing happened.
        waited: Duration,
    },
}
