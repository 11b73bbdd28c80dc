//! Settings of a process group.

use std::{fmt, time::Duration};

use crate::LaunchOptions;

/// What carries the messages of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum GroupBackend {
    /// MPI where Open MPI has launched the process and the feature `mpi` is on, TCP otherwise.
    #[default]
    Auto,
    /// A connection between any two ranks.
    Tcp,
    /// The MPI that launched the process; needs the feature `mpi`.
    Mpi,
}

/// How ranks become a group, and how long they wait for each other.
///
/// What says nothing of a rank is taken from the environment; see [`LaunchOptions`]. In files, times are in seconds:
/// `timeout_seconds`, `rendezvous_timeout_seconds`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
pub struct ProcessGroupOptions {
    /// Which rank this process is, and where all meet; what is set wins over the environment.
    pub launch: LaunchOptions,
    /// How long a collective waits for other ranks. Default: 10 minutes.
    #[cfg_attr(feature = "serde", serde(rename = "timeout_seconds", with = "seconds"))]
    pub timeout: Duration,
    /// How long ranks wait for each other at the start, and when a further communicator is made. Default: 5 minutes.
    #[cfg_attr(feature = "serde", serde(rename = "rendezvous_timeout_seconds", with = "seconds"))]
    pub rendezvous_timeout: Duration,
    /// What carries the messages.
    pub backend: GroupBackend,
    /// The name or IP address at which other ranks reach this one. Default: the address from which this machine reaches
    /// rank 0, and for rank 0 the launch's own.
    pub host: Option<String>,
    /// Has MPI form large sums and means of f32 and f64, in whatever order it likes: results may differ in the last bits
    /// from those of TCP and threads, and between runs. Without effect on other backends. The same on all ranks.
    pub native_sum: bool,
}

impl Default for ProcessGroupOptions {
    fn default() -> Self {
        Self {
            launch: LaunchOptions::default(),
            timeout: Duration::from_secs(600),
            rendezvous_timeout: Duration::from_secs(300),
            backend: GroupBackend::default(),
            host: None,
            native_sum: false,
        }
    }
}

impl ProcessGroupOptions {
    /// With another [`launch`](Self::launch).
    #[must_use]
    pub fn with_launch(self, launch: LaunchOptions) -> Self {
        Self { launch, ..self }
    }

    /// With another [`timeout`](Self::timeout).
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// With another [`rendezvous_timeout`](Self::rendezvous_timeout).
    #[must_use]
    pub fn with_rendezvous_timeout(self, rendezvous_timeout: Duration) -> Self {
        Self { rendezvous_timeout, ..self }
    }

    /// With another [`backend`](Self::backend).
    #[must_use]
    pub fn with_backend(self, backend: GroupBackend) -> Self {
        Self { backend, ..self }
    }

    /// With a [`host`](Self::host).
    #[must_use]
    pub fn with_host(self, host: impl Into<String>) -> Self {
        Self { host: Some(host.into()), ..self }
    }

    /// With another [`native_sum`](Self::native_sum).
    #[must_use]
    pub fn with_native_sum(self, native_sum: bool) -> Self {
        Self { native_sum, ..self }
    }
}

impl fmt::Display for GroupBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Tcp => "tcp",
            Self::Mpi => "mpi",
        })
    }
}

/// Durations in files: a number of seconds.
#[cfg(feature = "serde")]
mod seconds {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(duration.as_secs_f64())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        let seconds = f64::deserialize(deserializer)?;
        Duration::try_from_secs_f64(seconds)
            .ok()
            .filter(|duration| !duration.is_zero())
            .ok_or_else(|| D::Error::custom(format!("{seconds:e} seconds are no time to wait; give a number above 0")))
    }
}
