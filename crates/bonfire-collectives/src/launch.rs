//! How a process learns which rank it is: explicit options first, then what the launcher left in the environment.
//!
//! ```text
//! LaunchOptions (TOML, JSON, code) --field by field--> LaunchConfig: rank, local rank, world size, address, port, token
//!                                        ^
//! LaunchEnvironment (torchrun, Open MPI, Slurm; nothing: one rank)
//! ```

use std::num::NonZeroUsize;

mod environment;
mod error;
mod nodes;
mod token;

pub use environment::{LaunchEnvironment, Launcher};
pub use error::LaunchError;
pub use token::Token;

use environment::Setting;

/// One process's place in a run, and where the run meets. It cannot be contradictory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchConfig {
    launcher: Launcher,
    rank: usize,
    local_rank: usize,
    world_size: NonZeroUsize,
    address: String,
    port: u16,
    token: Token,
}

impl LaunchConfig {
    /// What the environment of this process says; nothing: one rank.
    ///
    /// # Errors
    ///
    /// As [`LaunchOptions::resolve`].
    pub fn from_env() -> Result<Self, LaunchError> {
        LaunchOptions::default().resolve()
    }

    /// Who has launched it, if the environment was asked.
    pub fn launcher(&self) -> Launcher {
        self.launcher
    }

    /// This process among all, below [`world_size`](Self::world_size).
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// This process among those of its node: which of the node's devices is its own.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// The number of processes of the run.
    pub fn world_size(&self) -> NonZeroUsize {
        self.world_size
    }

    /// Host name or IP address where rank 0 hosts the store.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Port where rank 0 hosts the store; 0, which only a single rank may have: any free one.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// What a process must know to join.
    pub fn token(&self) -> &Token {
        &self.token
    }
}

/// Explicit settings, each of which wins over the environment; what is unset is taken from there.
///
/// With the feature `serde` they can be read from any format; unknown fields are refused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
pub struct LaunchOptions {
    /// [`LaunchConfig::rank`].
    pub rank: Option<usize>,
    /// [`LaunchConfig::local_rank`].
    pub local_rank: Option<usize>,
    /// [`LaunchConfig::world_size`].
    pub world_size: Option<usize>,
    /// [`LaunchConfig::address`].
    pub address: Option<String>,
    /// [`LaunchConfig::port`].
    pub port: Option<u16>,
    /// [`LaunchConfig::token`].
    pub token: Option<Token>,
}

impl LaunchOptions {
    /// These options, completed from the environment of this process.
    ///
    /// # Errors
    ///
    /// Those of [`LaunchEnvironment::from_lookup`], unless the options leave nothing to ask it;
    /// [`LaunchError::Value`] for a world size of 0, an address that is none and a port of 0 with several ranks,
    /// [`LaunchError::OutOfRange`] for a rank that the world size does not have,
    /// [`LaunchError::Incomplete`] for several ranks of which this one does not know its own,
    /// [`LaunchError::NoMeetingPoint`] for several ranks without address or port.
    pub fn resolve(&self) -> Result<LaunchConfig, LaunchError> {
        self.resolve_with(|variable| std::env::var_os(variable).map(|value| value.to_string_lossy().into_owned()))
    }

    /// As [`resolve`](Self::resolve), with variables from any source.
    ///
    /// # Errors
    ///
    /// As [`resolve`](Self::resolve).
    pub fn resolve_with(&self, lookup: impl Fn(&'static str) -> Option<String>) -> Result<LaunchConfig, LaunchError> {
        let environment = if self.is_complete() {
            LaunchEnvironment::token_alone(lookup)?
        } else {
            LaunchEnvironment::from_lookup(lookup)?
        };
        self.over(&environment)
    }

    /// Whether no variable but the token's can matter, so that what others say about a launch is not even read.
    fn is_complete(&self) -> bool {
        let Self { rank, local_rank, world_size, address, port, token: _ } = self;
        rank.is_some() && local_rank.is_some() && world_size.is_some() && address.is_some() && port.is_some()
    }

    fn over(&self, environment: &LaunchEnvironment) -> Result<LaunchConfig, LaunchError> {
        let choose = |explicit: Option<usize>, name, other: Setting| match explicit {
            Some(value) => Setting { value, source: Some(name) },
            None => other,
        };
        let rank = choose(self.rank, "option rank", environment.rank);
        let local_rank = choose(self.local_rank, "option local_rank", environment.local_rank);
        let world_size = choose(self.world_size, "option world_size", environment.world_size);

        let num_ranks = NonZeroUsize::new(world_size.value).ok_or_else(|| LaunchError::Value {
            name: world_size.name(),
            value: "0".into(),
            expected: "a number of processes of at least 1",
        })?;
        let is_alone = num_ranks.get() == 1;
        for (setting, missing) in [(rank, "rank"), (local_rank, "local_rank")] {
            if setting.value >= num_ranks.get() {
                return Err(LaunchError::OutOfRange {
                    name: setting.source.unwrap_or(missing),
                    value: setting.value,
                    world_size: num_ranks.get(),
                    world_size_name: world_size.name(),
                });
            }
            // Every process would take itself for rank 0, or for the owner of the node's first device.
            if !is_alone && setting.source.is_none() {
                return Err(LaunchError::Incomplete {
                    set: world_size.name(),
                    value: num_ranks.to_string(),
                    missing: if missing == "rank" { "option rank" } else { "option local_rank" },
                });
            }
        }

        let no_meeting_point = |missing| LaunchError::NoMeetingPoint {
            launcher: environment.launcher,
            world_size: num_ranks.get(),
            missing,
        };
        let address = match self.address.as_deref().map(str::trim).or(environment.address.as_deref()) {
            Some(address) => checked_address(
                if self.address.is_some() { "option address" } else { environment.address_name },
                address,
            )?,
            None if is_alone => "127.0.0.1".into(),
            None => return Err(no_meeting_point("address")),
        };
        let port = match self.port.or(environment.port) {
            Some(0) if !is_alone => {
                return Err(LaunchError::Value {
                    name: if self.port.is_some() { "option port" } else { "MASTER_PORT" },
                    value: "0".into(),
                    expected: "a port from 1 to 65535: other ranks cannot know which free one rank 0 finds",
                });
            }
            Some(port) => port,
            None if is_alone => 0,
            None => return Err(no_meeting_point("port")),
        };
        let token = self.token.clone().unwrap_or_else(|| environment.token.clone());
        Ok(LaunchConfig {
            launcher: environment.launcher,
            rank: rank.value,
            local_rank: local_rank.value,
            world_size: num_ranks,
            address,
            port,
            token,
        })
    }
}

/// An IP address or a host name; the port has a field of its own.
fn checked_address(name: &'static str, address: &str) -> Result<String, LaunchError> {
    let is_ip = address.parse::<std::net::IpAddr>().is_ok();
    let is_host = !address.is_empty()
        && address.len() <= 253
        && address.chars().all(|c| c.is_alphanumeric() || matches!(c, '.' | '-' | '_'));
    if is_ip || is_host {
        return Ok(address.into());
    }
    Err(LaunchError::Value { name, value: address.into(), expected: "a host name or an IP address, without a port" })
}
