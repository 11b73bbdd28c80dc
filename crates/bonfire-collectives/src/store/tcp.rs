//! A store that rank 0 hosts and all others reach over TCP.

use std::{
    net::Ipv6Addr,
    num::NonZeroUsize,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    Store, StoreError, check_keys, check_value,
    client::Client,
    host::Host,
    wire::{Reply, Request},
};
use crate::launch::{LaunchConfig, Token};

/// A store for ranks that are processes. Clones share it.
///
/// Rank 0 hosts it for as long as a clone of it lives; when the last one is dropped, all its threads end and the calls of
/// other ranks fail with [`StoreError::HostGone`]. So rank 0 keeps it until all are done, which a
/// [`rendezvous`](crate::rendezvous) at the end can tell. Threads of a rank may call at the same time.
///
/// The port may be open to strangers: who does not know the token gets nothing, what is no message ends its own
/// connection alone, and time, memory and connections are bounded. Token and values cross the network as they are, so a
/// network that others listen on is no place for it.
#[derive(Clone)]
pub struct TcpStore {
    side: Side,
}

#[derive(Clone)]
enum Side {
    Host(Arc<Host>),
    Other(Arc<Client>),
}

impl TcpStore {
    /// Hosts the store if this is rank 0, and connects to it otherwise.
    ///
    /// # Errors
    ///
    /// Those of [`host`](Self::host) and [`connect`](Self::connect).
    pub fn join(config: &LaunchConfig, timeout: Duration) -> Result<Self, StoreError> {
        let (address, port, token) = (config.address(), config.port(), config.token().clone());
        match config.rank() {
            0 => Self::host(address, port, token, config.world_size()),
            rank => Self::connect(address, port, token, rank, timeout),
        }
    }

    /// Hosts a store, as rank 0 of `world_size`, at an IP address or a host name of this machine.
    ///
    /// A loopback address keeps it to this machine, any other opens the port on all its devices. Port 0 finds a free one:
    /// [`port`](Self::port).
    ///
    /// # Errors
    ///
    /// [`StoreError::PortInUse`] if somebody else listens there, [`StoreError::Bind`] for anything else the system says.
    pub fn host(address: &str, port: u16, token: Token, world_size: NonZeroUsize) -> Result<Self, StoreError> {
        Host::start(address, port, token, world_size.get()).map(|host| Self { side: Side::Host(Arc::new(host)) })
    }

    /// Connects to the store at `address`, as rank `rank`; tries again until it is there, or for `timeout`.
    ///
    /// `timeout` also bounds how long a later connection takes, where threads of this rank call at the same time.
    /// Finding the address of a name takes as long as the system takes.
    ///
    /// # Errors
    ///
    /// [`StoreError::Connect`] if no store answers in time, [`StoreError::Refused`] if it lets this process not in.
    pub fn connect(address: &str, port: u16, token: Token, rank: usize, timeout: Duration) -> Result<Self, StoreError> {
        let rank = u32::try_from(rank).map_err(|_| StoreError::TooLong {
            what: "the number of the rank",
            actual: rank,
            max: u32::MAX as usize,
            unit: "",
        })?;
        Client::connect(address, port, token, rank, timeout).map(|client| Self { side: Side::Other(Arc::new(client)) })
    }

    /// The port of the store.
    pub fn port(&self) -> u16 {
        match &self.side {
            Side::Host(host) => host.port(),
            Side::Other(client) => client.port(),
        }
    }
}

/// Address and port, as one writes them.
pub(crate) fn show(address: &str, port: u16) -> String {
    match address.parse::<Ipv6Addr>() {
        Ok(address) => format!("[{address}]:{port}"),
        Err(_) => format!("{address}:{port}"),
    }
}

impl Host {
    /// Names who never joined, which the memory does not know.
    fn with_absent<T>(&self, result: Result<T, StoreError>) -> Result<T, StoreError> {
        result.map_err(|error| match error {
            StoreError::Timeout { keys, waited, .. } => StoreError::Timeout { keys, waited, absent: self.absent() },
            other => other,
        })
    }
}

impl Client {
    fn ask(&self, request: &Request, keys: &[&str], timeout: Duration) -> Result<Reply, StoreError> {
        let start = Instant::now();
        let reply = self.call(request, timeout)?;
        self.check(reply, keys, start.elapsed())
    }
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        check_keys([key])?;
        check_value(value)?;
        match &self.side {
            Side::Host(host) => host.memory().set(key, value),
            Side::Other(client) => {
                let request = Request::Set { key: key.into(), value: value.into() };
                match client.ask(&request, &[key], Duration::ZERO)? {
                    Reply::Done => Ok(()),
                    _ => Err(client.confused()),
                }
            }
        }
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, StoreError> {
        check_keys([key])?;
        match &self.side {
            Side::Host(host) => host.with_absent(host.memory().get(key, timeout)),
            Side::Other(client) => match client.ask(&Request::Get { key: key.into(), timeout }, &[key], timeout)? {
                Reply::Value(value) => Ok(value),
                _ => Err(client.confused()),
            },
        }
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64, StoreError> {
        check_keys([key])?;
        match &self.side {
            Side::Host(host) => host.memory().add(key, amount),
            Side::Other(client) => {
                match client.ask(&Request::Add { key: key.into(), amount }, &[key], Duration::ZERO)? {
                    Reply::Sum(sum) => Ok(sum),
                    _ => Err(client.confused()),
                }
            }
        }
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), StoreError> {
        check_keys(keys.iter().copied())?;
        match &self.side {
            Side::Host(host) => host.with_absent(host.memory().wait(keys, timeout)),
            Side::Other(client) => {
                let names = keys.iter().map(|key| (*key).to_owned()).collect();
                match client.ask(&Request::Wait { keys: names, timeout }, keys, timeout)? {
                    Reply::Done => Ok(()),
                    _ => Err(client.confused()),
                }
            }
        }
    }
}
