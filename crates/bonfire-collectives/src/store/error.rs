//! What can go wrong with a store, and between ranks that meet at one.

use std::{fmt, time::Duration};

/// Why a store did not do what it was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Nobody set a key in time.
    #[error(
        "waited {waited:?} for {}, which nobody has set{}; look at the ranks that should, or raise the timeout",
        List(.keys, "key"),
        Absent(.absent)
    )]
    Timeout {
        /// The keys that are missing.
        keys: Vec<String>,
        /// How long the call waited.
        waited: Duration,
        /// The ranks that have never joined the store, where that is known.
        absent: Vec<usize>,
    },

    /// `add` to something that cannot be added to.
    #[error("cannot add to key {key:?}: {reason}; use another key")]
    NotANumber {
        /// The key.
        key: String,
        /// What stands in the way.
        reason: String,
    },

    /// Something is over its bound.
    #[error("{what} has {actual} {unit}, at most {max} are allowed; a store is for small values")]
    TooLong {
        /// What is too long.
        what: &'static str,
        /// Its length.
        actual: usize,
        /// The bound.
        max: usize,
        /// Of both.
        unit: &'static str,
    },

    /// All values together are at their bound.
    #[error("the store would hold more than {max_bytes} bytes; a store is for small values")]
    Full {
        /// The bound.
        max_bytes: usize,
    },

    /// The port is in use.
    #[error(
        "cannot host the store: port {address} is in use; another run may have it: \
         give this one another port (MASTER_PORT, or the option port), or end the other"
    )]
    PortInUse {
        /// Address and port.
        address: String,
    },

    /// The store cannot be hosted here, for another reason.
    #[error("cannot host the store at {address}: {reason}; rank 0 must run on the machine that has this address")]
    Bind {
        /// Address and port.
        address: String,
        /// What the system says.
        reason: String,
    },

    /// Rank 0 did not answer in time.
    #[error(
        "rank {rank} found no store at {address} within {waited:?} ({reason}); check that rank 0 runs, \
         that address and port (MASTER_ADDR, MASTER_PORT) lead to it, and that no firewall is between"
    )]
    Connect {
        /// The rank that tried.
        rank: usize,
        /// Where.
        address: String,
        /// How long.
        waited: Duration,
        /// How the last try failed.
        reason: String,
    },

    /// What listens there does not let this process in.
    #[error("rank {rank} was turned away at {address}: {refusal}")]
    Refused {
        /// The rank that tried.
        rank: usize,
        /// Where.
        address: String,
        /// Why.
        refusal: Refusal,
    },

    /// The process that hosts the store is gone.
    #[error(
        "rank {rank} lost the store that rank 0 hosts at {address} ({reason}); rank 0 has ended or cannot be reached: \
         look at its output for the cause, and start the run again"
    )]
    HostGone {
        /// The rank that noticed.
        rank: usize,
        /// Where the store was.
        address: String,
        /// What came first.
        reason: String,
    },

    /// This process closed the store.
    #[error("the store is closed; keep it until all ranks are done with it")]
    Closed,

    /// Ranks did not come to a rendezvous.
    #[error(
        "rank {rank} of {world_size}: rendezvous {name:?} waited {waited:?}; {} did not come; \
         look there for the cause, or raise the timeout",
        List(.missing, "rank")
    )]
    RanksMissing {
        /// The rank that waited.
        rank: usize,
        /// The number of ranks it expects.
        world_size: usize,
        /// The rendezvous.
        name: String,
        /// How long.
        waited: Duration,
        /// The ranks that did not come.
        missing: Vec<usize>,
    },

    /// Ranks that met are not of one run.
    #[error(
        "rank {rank} of {world_size}: rendezvous {name:?} found ranks that differ: {}; start all ranks with the same settings",
        .differences.join("; ")
    )]
    Disagreement {
        /// The rank that reports.
        rank: usize,
        /// The number of ranks it expects.
        world_size: usize,
        /// The rendezvous.
        name: String,
        /// What differs, with the ranks and their values.
        differences: Vec<String>,
    },
}

/// Why a store does not let a process in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Another version of the protocol.
    Version {
        /// What the host speaks.
        host: u16,
        /// What this process speaks.
        own: u16,
    },
    /// Another token.
    Token,
    /// As many connections as the host allows.
    Crowded,
    /// It is no store of Bonfire.
    NotAStore,
    /// Another group, another world size, or a rank that is there already.
    Group,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version { host, own } => write!(
                f,
                "the host speaks version {host} of the protocol, this process version {own}; build all ranks from one version"
            ),
            Self::Token => f.write_str(
                "its token is another; the port may belong to another run, or BONFIRE_TOKEN (option token) is not the same on all ranks",
            ),
            Self::Crowded => f.write_str("it has as many connections as it allows; close stores that are not needed"),
            Self::NotAStore => f.write_str(
                "something else listens there; give the run another port (MASTER_PORT, or the option port)",
            ),
            Self::Group => f.write_str("it is of another group, or another process has this rank"),
        }
    }
}

/// How many of a long list a message shows.
const MAX_SHOWN: usize = 16;

/// `key "a"`, or `keys ["a", "b"]`.
struct List<'a, T>(&'a [T], &'static str);

impl<T: fmt::Debug> fmt::Display for List<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [one] => write!(f, "{} {one:?}", self.1),
            many if many.len() <= MAX_SHOWN => write!(f, "{}s {many:?}", self.1),
            many => write!(f, "{}s {:?} and {} more", self.1, &many[..MAX_SHOWN], many.len() - MAX_SHOWN),
        }
    }
}

struct Absent<'a>(&'a [usize]);

impl fmt::Display for Absent<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [] => Ok(()),
            ranks => write!(f, "; {} never joined the store", List(ranks, "rank")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_list_is_cut_in_the_message_alone() {
        let missing: Vec<usize> = (0..100).collect();
        let message = List(&missing, "rank").to_string();
        assert!(message.ends_with("14, 15] and 84 more"), "{message}");
        assert_eq!(List(&[3], "rank").to_string(), "rank 3");
        assert_eq!(List(&["a", "b"], "key").to_string(), r#"keys ["a", "b"]"#);
    }
}
