//! Who carries a machine to the other host: its own QEMU, or libvirt.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::super::QMP_LIMIT;
use super::super::monitor::{Monitor, MonitorError};
use super::super::qmp::Qmp;
use super::{Migrate, Standing, standing};
use crate::failure::Failure;

/// Sends the machine, and tells where it is.
pub(super) trait Carrier {
    /// The monitor of the QEMU here.
    fn monitor(&mut self) -> &mut dyn Monitor;

    /// Where the machine is, and what is said of its way.
    ///
    /// # Errors
    /// Nobody says it.
    fn standing(&mut self) -> Result<(Standing, Value), Failure>;

    /// Begins to send it.
    ///
    /// # Errors
    /// It is not sent.
    fn send(&mut self) -> Result<(), Failure>;

    /// It is to stay here. What is asked for later is where it is.
    ///
    /// # Errors
    /// Nobody was told.
    fn cancel(&mut self) -> Result<(), Failure>;

    /// What the other side finds it by, where it has such a name.
    ///
    /// # Errors
    /// Nobody says it.
    fn domain(&self) -> Result<Option<String>, Failure>;

    /// Why it is here after it was sent.
    fn why(&self, told: &Value) -> String;
}

/// QEMU's own migration.
pub(super) struct Direct<'a> {
    qemu: Qmp,
    to: &'a str,
}

impl<'a> Direct<'a> {
    pub(super) fn open(migrate: &'a Migrate) -> Result<Self, Failure> {
        // clap insists on one of the two.
        let socket = migrate.qmp.as_deref().unwrap_or(std::path::Path::new(""));
        Ok(Self {
            qemu: Qmp::connect(socket, QMP_LIMIT)?,
            to: &migrate.to,
        })
    }
}

impl Carrier for Direct<'_> {
    fn monitor(&mut self) -> &mut dyn Monitor {
        &mut self.qemu
    }

    fn standing(&mut self) -> Result<(Standing, Value), Failure> {
        let begun = Instant::now();
        loop {
            match standing(&mut self.qemu) {
                // Its last step may take it long, in which it answers nobody.
                Err(MonitorError::Silent(..)) if begun.elapsed() < SILENCE => {}
                other => return Ok(other?),
            }
        }
    }

    fn send(&mut self) -> Result<(), Failure> {
        self.qemu.execute("migrate", json!({"uri": self.to}))?;
        Ok(())
    }

    fn cancel(&mut self) -> Result<(), Failure> {
        self.qemu.execute("migrate_cancel", json!({}))?;
        Ok(())
    }

    fn domain(&self) -> Result<Option<String>, Failure> {
        Ok(None)
    }

    fn why(&self, told: &Value) -> String {
        let status = told["status"].as_str().unwrap_or("unknown");
        let why = told["error-desc"].as_str();
        let why = why.unwrap_or("QEMU does not say why");
        format!("QEMU's migration {status}: {why}")
    }
}

/// How long QEMU may answer nothing while it sends the machine.
const SILENCE: Duration = Duration::from_secs(60);
