//! All ranks of a run, as one process sees them.
//!
//! ```text
//! options, environment -> LaunchConfig -> Store -> rendezvous -> transport -> Communicator
//! ```

mod error;
#[cfg(feature = "mpi")]
mod mpi;
mod options;
mod threads;

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket},
    num::NonZeroUsize,
    sync::Arc,
    time::Duration,
};

pub use error::ProcessGroupError;
pub use options::{GroupBackend, ProcessGroupOptions};
use threads::ThreadGroups;
pub(crate) use threads::groups;

use crate::{
    Communicator, Configuration, LaunchConfig, LaunchOptions, Launcher, Meeting, Store, TcpCommunicator, TcpStore,
    TcpTransport, rendezvous,
};

/// One rank of a run: its number, its communicator with all other ranks, and a store of small values.
///
/// ```
/// use bonfire_collectives::{BufferMut, ProcessGroup, ReduceOp};
///
/// // Alone, or whatever mpirun, srun or torchrun started: `ProcessGroup::from_env()`.
/// let group = ProcessGroup::single()?;
/// let mut gradient = [group.rank() as f32 + 1.0];
/// group.communicator().all_reduce(BufferMut::from_slice(&mut gradient), ReduceOp::Mean)?;
/// assert_eq!(gradient, [1.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Dropping it, and whoever else holds its communicators, tells the other ranks that this one has ended. Rank 0 hosts the
/// store, so it keeps its group until no rank needs that any more: a [`barrier`](Communicator::barrier) tells.
pub struct ProcessGroup {
    rank: usize,
    local_rank: usize,
    world_size: NonZeroUsize,
    communicator: Arc<dyn Communicator>,
    store: Arc<dyn Store>,
    maker: Maker,
}

/// How further communicators are made.
enum Maker {
    Threads(Arc<ThreadGroups>),
    Tcp(Tcp),
    #[cfg(feature = "mpi")]
    Mpi(mpi::Mpi),
}

/// What every TCP group of this process needs.
struct Tcp {
    config: LaunchConfig,
    host: String,
    timeout: Duration,
    rendezvous_timeout: Duration,
}

/// The name of the communicator that every group has; those of users have a prefix.
const MAIN: &str = "main";

impl ProcessGroup {
    /// The group of the run that this process was launched in; nothing in the environment: a run of one rank.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn from_env() -> Result<Self, ProcessGroupError> {
        Self::new(&ProcessGroupOptions::default())
    }

    /// A run of one rank, whatever the environment says; otherwise as any other.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn single() -> Result<Self, ProcessGroupError> {
        let launch = LaunchOptions {
            rank: Some(0),
            local_rank: Some(0),
            world_size: Some(1),
            address: Some("127.0.0.1".into()),
            port: Some(0),
            token: None,
        };
        Self::new(&ProcessGroupOptions { launch, backend: GroupBackend::Tcp, ..ProcessGroupOptions::default() })
    }

    /// The group of the run that options, and the environment where they say nothing, describe.
    ///
    /// Comes back when all ranks have found each other.
    ///
    /// # Errors
    ///
    /// [`ProcessGroupError::Launch`] if rank, world size or meeting point are missing or wrong,
    /// [`ProcessGroupError::Store`] if the ranks do not meet: [`StoreError`](crate::StoreError) says why,
    /// [`ProcessGroupError::Unavailable`] if the backend cannot be used,
    /// and those of [`TcpTransport::connect`].
    pub fn new(options: &ProcessGroupOptions) -> Result<Self, ProcessGroupError> {
        Self::with_config(options.launch.resolve()?, options)
    }

    /// The group of the run that `config` describes; `options.launch` is not looked at.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with_config(config: LaunchConfig, options: &ProcessGroupOptions) -> Result<Self, ProcessGroupError> {
        let backend = choose(&config, options.backend)?;
        let (rank, world_size, local_rank) = (config.rank(), config.world_size(), config.local_rank());
        let store = TcpStore::join(&config, options.rendezvous_timeout)?;
        let same_on_all = Configuration::new()
            .with("version", env!("CARGO_PKG_VERSION"))
            .with("backend", backend)
            .with("native_sum", options.native_sum);
        rendezvous(&store, &Meeting::new("process_group", &config, options.rendezvous_timeout), &same_on_all)?;
        let maker = Maker::new(backend, config, options)?;
        let communicator = maker.communicator(rank, &store, MAIN)?;
        tracing::info!(rank, %world_size, %backend, "joined the process group");
        Ok(Self { rank, local_rank, world_size, communicator, store: Arc::new(store), maker })
    }

    fn of_thread(
        rank: usize,
        world_size: NonZeroUsize,
        communicator: Arc<dyn Communicator>,
        store: Arc<dyn Store>,
        shared: Arc<ThreadGroups>,
    ) -> Self {
        Self { rank, local_rank: rank, world_size, communicator, store, maker: Maker::Threads(shared) }
    }

    /// This rank, below [`world_size`](Self::world_size).
    #[must_use]
    pub const fn rank(&self) -> usize {
        self.rank
    }

    /// This rank among those of its node: which of the node's devices is its own.
    #[must_use]
    pub const fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// The number of ranks.
    #[must_use]
    pub const fn world_size(&self) -> usize {
        self.world_size.get()
    }

    /// This rank's end of the group of all ranks.
    #[must_use]
    pub fn communicator(&self) -> Arc<dyn Communicator> {
        self.communicator.clone()
    }

    /// This rank's end of a further group of all ranks, for collectives whose order is independent of others.
    ///
    /// All ranks call it with the same name; each name can be used once. They meet at the group's own communicator first,
    /// which must not be in use: a rank that has ended by then is named at once.
    ///
    /// # Errors
    ///
    /// [`ProcessGroupError::Collective`] if the ranks do not meet, [`ProcessGroupError::NameTaken`] if the name was used before, [`ProcessGroupError::Missing`] if ranks do not come in
    /// time, and what else keeps ranks from connecting.
    pub fn new_communicator(&self, name: &str) -> Result<Arc<dyn Communicator>, ProcessGroupError> {
        self.communicator.barrier()?;
        self.maker.communicator(self.rank, &*self.store, &format!("user/{name}"))
    }

    /// Small values that all ranks can set and read.
    #[must_use]
    pub fn store(&self) -> Arc<dyn Store> {
        self.store.clone()
    }
}

impl Maker {
    fn new(
        backend: GroupBackend,
        config: LaunchConfig,
        options: &ProcessGroupOptions,
    ) -> Result<Self, ProcessGroupError> {
        #[cfg(feature = "mpi")]
        if backend == GroupBackend::Mpi {
            return mpi::Mpi::new(&config, options).map(Self::Mpi);
        }
        debug_assert_eq!(backend, GroupBackend::Tcp, "the only other one for processes");
        let host = options.host.clone().filter(|host| !host.is_empty()).unwrap_or_else(|| own_host(&config));
        let (timeout, rendezvous_timeout) = (options.timeout, options.rendezvous_timeout);
        Ok(Self::Tcp(Tcp { config, host, timeout, rendezvous_timeout }))
    }

    fn communicator(
        &self,
        rank: usize,
        store: &dyn Store,
        name: &str,
    ) -> Result<Arc<dyn Communicator>, ProcessGroupError> {
        match self {
            Self::Threads(shared) => Ok(Arc::new(shared.take(rank, name)?)),
            Self::Tcp(tcp) => tcp.communicator(store, name),
            #[cfg(feature = "mpi")]
            Self::Mpi(mpi) => mpi.communicator(store, name),
        }
    }
}

impl Tcp {
    fn communicator(&self, store: &dyn Store, name: &str) -> Result<Arc<dyn Communicator>, ProcessGroupError> {
        let meeting = Meeting::new(name, &self.config, self.rendezvous_timeout);
        let transport = TcpTransport::connect(store, &meeting, self.config.token(), &self.host)?;
        Ok(Arc::new(TcpCommunicator::new(transport, self.timeout)))
    }
}

/// The backend that is used, never [`GroupBackend::Auto`].
fn choose(config: &LaunchConfig, backend: GroupBackend) -> Result<GroupBackend, ProcessGroupError> {
    match backend {
        GroupBackend::Auto if cfg!(feature = "mpi") && config.launcher() == Launcher::OpenMpi => Ok(GroupBackend::Mpi),
        GroupBackend::Auto | GroupBackend::Tcp => Ok(GroupBackend::Tcp),
        GroupBackend::Mpi if cfg!(feature = "mpi") => Ok(GroupBackend::Mpi),
        GroupBackend::Mpi => {
            let reason = "this build has no MPI; turn on the feature `mpi`, or choose tcp or auto".into();
            Err(ProcessGroupError::Unavailable { rank: config.rank(), backend: "mpi", reason })
        }
    }
}

/// Where other ranks reach this one: for rank 0 where they have found the store, for others the address from which this
/// machine reaches that.
fn own_host(config: &LaunchConfig) -> String {
    let toward = || {
        let to: SocketAddr = (config.address(), config.port().max(1)).to_socket_addrs().ok()?.next()?;
        let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let socket = UdpSocket::bind((any, 0)).ok()?;
        // Sends nothing: it only asks the system for the way.
        socket.connect(to).ok()?;
        Some(socket.local_addr().ok()?.ip().to_string())
    };
    let found = if config.rank() == 0 { None } else { toward() };
    found.unwrap_or_else(|| config.address().to_owned())
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ProcessGroup(rank {} of {})", self.rank, self.world_size)
    }
}
