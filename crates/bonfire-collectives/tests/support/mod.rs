//! A transport in memory: the simplest one that keeps the contract.

use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, Mutex},
    time::{Duration, Instant},
};

use bonfire_collectives::{Incoming, Outgoing, Transport, TransportError, Watch};

enum Parcel {
    Message(Vec<u8>),
    Notice(Vec<u8>),
    End,
}

#[derive(Default)]
struct Mailbox {
    parcels: Mutex<VecDeque<(usize, Parcel)>>,
    changed: Condvar,
}

/// What a rank has taken from its mailbox but not yet given out.
struct Early {
    messages: Vec<VecDeque<Vec<u8>>>,
    has_ended: Vec<bool>,
}

pub(crate) struct ChannelTransport {
    rank: usize,
    mailboxes: Arc<Vec<Mailbox>>,
    early: Mutex<Early>,
}

impl ChannelTransport {
    pub(crate) fn mesh(world_size: usize) -> Vec<Self> {
        let mailboxes = Arc::new((0..world_size).map(|_| Mailbox::default()).collect::<Vec<_>>());
        let early = || {
            let messages = (0..world_size).map(|_| VecDeque::new()).collect();
            Mutex::new(Early { messages, has_ended: vec![false; world_size] })
        };
        (0..world_size).map(|rank| Self { rank, mailboxes: mailboxes.clone(), early: early() }).collect()
    }

    fn post(&self, to: usize, parcel: Parcel) {
        let mailbox = &self.mailboxes[to];
        mailbox.parcels.lock().unwrap().push_back((self.rank, parcel));
        mailbox.changed.notify_all();
    }
}

impl Transport for ChannelTransport {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.mailboxes.len()
    }

    fn exchange(
        &self,
        outgoing: &mut [Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
        deadline: Instant,
        watch: &mut dyn Watch,
    ) -> Result<(), TransportError> {
        for message in outgoing {
            self.post(message.to, Parcel::Message(message.bytes.to_vec()));
            message.is_sent = true;
        }
        let mut early = self.early.lock().unwrap();
        let mailbox = &self.mailboxes[self.rank];
        loop {
            let mut stop = false;
            let parcels = std::mem::take(&mut *mailbox.parcels.lock().unwrap());
            for (from, parcel) in parcels {
                match parcel {
                    Parcel::Message(message) => early.messages[from].push_back(message),
                    Parcel::Notice(notice) => stop |= watch.notice(from, &notice).is_break(),
                    Parcel::End => early.has_ended[from] = true,
                }
            }
            for room in incoming.iter_mut().filter(|room| !room.is_received) {
                if let Some(message) = early.messages[room.from].pop_front() {
                    room.bytes[..message.len()].copy_from_slice(&message);
                    (room.num_received, room.is_received) = (message.len(), true);
                    watch.arrived(room.from, &message);
                } else if early.has_ended[room.from] {
                    return Err(TransportError::Ended { rank: room.from });
                }
            }
            if stop || watch.tick().is_break() {
                return Err(TransportError::Stopped);
            }
            if incoming.iter().all(|room| room.is_received) {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(TransportError::Late);
            }
            let parcels = mailbox.parcels.lock().unwrap();
            if parcels.is_empty() {
                drop(mailbox.changed.wait_timeout(parcels, Duration::from_millis(5)).unwrap());
            }
        }
    }

    fn notify(&self, to: usize, notice: &[u8]) {
        self.post(to, Parcel::Notice(notice.to_vec()));
    }
}

impl Drop for ChannelTransport {
    fn drop(&mut self) {
        (0..self.mailboxes.len()).for_each(|to| self.post(to, Parcel::End));
    }
}

/// The same, but a notice comes only when the one who sent it is in its next call, or ends.
pub(crate) struct LateNotices {
    channel: ChannelTransport,
    held_back: Mutex<Vec<(usize, Vec<u8>)>>,
}

impl LateNotices {
    pub(crate) fn mesh(world_size: usize) -> Vec<Self> {
        let late = |channel| Self { channel, held_back: Mutex::default() };
        ChannelTransport::mesh(world_size).into_iter().map(late).collect()
    }

    fn let_go(&self) {
        self.held_back.lock().unwrap().drain(..).for_each(|(to, notice)| self.channel.notify(to, &notice));
    }
}

impl Transport for LateNotices {
    fn rank(&self) -> usize {
        self.channel.rank()
    }

    fn world_size(&self) -> usize {
        self.channel.world_size()
    }

    fn exchange(
        &self,
        outgoing: &mut [Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
        deadline: Instant,
        watch: &mut dyn Watch,
    ) -> Result<(), TransportError> {
        self.let_go();
        self.channel.exchange(outgoing, incoming, deadline, watch)
    }

    fn notify(&self, to: usize, notice: &[u8]) {
        self.held_back.lock().unwrap().push((to, notice.to_vec()));
    }
}

impl Drop for LateNotices {
    fn drop(&mut self) {
        self.let_go();
    }
}
