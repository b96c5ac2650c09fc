//! Making a switch: its entrances, and the uplinks, which are its first ports.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use vnplug_frame::MAX_BATCH;
use vnplug_path::source::{Queue, QueueCounters, SourceError};

use super::{BATCH, ENOUGH, SENT_EACH, Switch, UPLINKS, WAKER};
use crate::batch::Batch;
use crate::board::Switchboard;
use crate::clock::Clock;
use crate::config::SwitchConfig;
use crate::control;
use crate::direct::Directs;
use crate::entrances::{Entrances, Served};
use crate::exits::Exits;
use crate::forward::{Forwarder, Number};
use crate::lanes::Lanes;
use crate::roster::{Roster, locked};
use crate::settings::Settings;
use crate::show::NOT_OF_UPLINKS;
use crate::turn::Spare;
use crate::twin::{Twin, limits};
use crate::uplink::{Uplink, Uplinks};

impl Switch {
    /// Makes the switch and its entrances; they are served when the source is.
    ///
    /// # Errors
    /// [`SourceError`] if an entrance cannot be made.
    pub fn open(config: SwitchConfig) -> Result<(Box<dyn Queue>, Switchboard), SourceError> {
        Self::open_with(config, Vec::new(), None)
    }

    /// As [`open`](Self::open), with uplinks, which are its first ports in this order, and with the twin that some
    /// of them have.
    ///
    /// # Errors
    /// [`SourceError`] if an entrance or an uplink cannot be made.
    pub fn open_with(
        config: SwitchConfig,
        uplinks: Vec<Uplink>,
        mut twin: Option<Twin>,
    ) -> Result<(Box<dyn Queue>, Switchboard), SourceError> {
        let limits = limits(&config);
        let name = config.name.clone();
        let failed = |what: &str| {
            let what = format!("switch {name:?}: {what}");
            move |error: std::io::Error| SourceError::io(what, error)
        };
        let (line, inlet) = control::line().map_err(failed("no descriptors"))?;
        let epoll = epoll::create(CreateFlags::CLOEXEC);
        let epoll = epoll.map_err(|error| failed("no descriptors")(error.into()))?;
        let far = Uplinks::new(&name).map_err(failed("no descriptors"))?;
        for (fd, number) in [(inlet.waker.as_fd(), WAKER), (far.epoll(), UPLINKS)] {
            let watched = epoll::add(&epoll, fd, EventData::new_u64(number), EventFlags::IN);
            watched.map_err(|error| failed("no descriptors")(error.into()))?;
        }
        let settings = config.settings.clone();
        let roster = Roster::new(config.ports, settings.clone());
        let board = Switchboard {
            roster,
            line,
            entrances: Arc::default(),
        };
        Entrances::make(&config, &board)?;
        let mut forwarder = Forwarder::new(limits);
        if let Some(twin) = &mut twin {
            forwarder.judge = twin.take_judge();
            let numbered = (1..).zip(&uplinks);
            let ports: Vec<_> = numbered
                .filter(|(_, uplink)| uplink.is_twin)
                .map(|(number, uplink): (Number, _)| (number, uplink.interface.as_str()))
                .collect();
            forwarder.table = twin.table(limits, &ports);
        }
        let clock = Clock::new(twin.is_some());
        let (line, view) = (board.line.clone(), forwarder.table.view());
        let lanes = Lanes::new(config.lanes, config.longest, line, view, clock);
        let mut switch = Self {
            uplinks: far,
            uplinks_have: false,
            name: name.clone(),
            forwarder,
            exits: Exits::new(epoll),
            directs: Directs::default(),
            inlet,
            entrances: Served(Arc::clone(&board.entrances)),
            is_open: false,
            ready: VecDeque::new(),
            settings: Settings::default(),
            lost: Vec::new(),
            came: Batch::new(BATCH, config.longest).until(ENOUGH),
            sent: Batch::new(MAX_BATCH, SENT_EACH.max(config.longest)),
            taken: Vec::new(),
            is_unread: false,
            spare: Spare::default(),
            clock,
            lanes,
            lane_forwarded: 0,
            twin,
            is_watched: false,
            counters: QueueCounters::default(),
        };
        switch.set_all(settings);
        for (number, uplink) in (1..).zip(uplinks) {
            let interface = uplink.interface.clone();
            let cannot = |error: SourceError| SourceError {
                what: format!("switch {name:?}: uplink {interface}: {}", error.what),
                cause: error.cause,
            };
            switch.connect(uplink, number, &board).map_err(cannot)?;
        }
        if let Some(twin) = &mut switch.twin {
            twin.settle();
        }
        Ok((Box::new(switch), board))
    }

    /// Makes an interface a port.
    fn connect(
        &mut self,
        uplink: Uplink,
        number: Number,
        board: &Switchboard,
    ) -> Result<(), SourceError> {
        let mut roster = locked(&board.roster);
        let settings = roster.settings.ports.get(&number);
        if settings.is_some_and(|it| it.gro > 0 || it.expands_acks) {
            return Err(SourceError::new(format!("port {number} {NOT_OF_UPLINKS}")));
        }
        let port = roster.take(uplink.holder(), Some(number));
        drop(roster);
        let port = port.map_err(SourceError::new)?.get();
        board.entrances.note(&uplink, port);
        // NB: first. What the gate decides somebody must do.
        if let Some(twin) = &mut self.twin
            && uplink.is_twin
        {
            twin.add(port, &uplink.interface);
        }
        let link = self.uplinks.add(uplink, port)?;
        self.exits.add_unwatched(port, link);
        self.forwarder.table.set_uplink(port, true);
        self.join(port);
        Ok(())
    }
}
