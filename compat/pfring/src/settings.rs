//! What was asked of a ring, so that its ports can be opened again with all of it.

use std::time::Duration;

use vnplug::{Balance, FilterSpec, PortOptions, Tuning};

/// See the module's comment.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// Longest captured length; 0 = whole packets.
    pub(crate) caplen: u32,
    /// Direction, sampling, enabled.
    pub(crate) tuning: Tuning,
    /// The program's expression; empty = all.
    pub(crate) filter: String,
    /// The VLAN asked for; `None` = all.
    pub(crate) vlan: Option<u16>,
    /// Cluster number and how it shares.
    pub(crate) cluster: Option<(u32, Balance)>,
    /// The group that the ports join; empty = none.
    pub(crate) group: String,
    /// By which the daemon knows the ring's ports, those that send among them.
    pub(crate) handle: u64,
    /// What the operator sees; empty = the library's default.
    pub(crate) label: String,
    /// Packets at which a sleeper is woken; `None` = the program did not say.
    pub(crate) watermark: Option<u32>,
    /// Longest wait for the watermark; `None` = the program did not say.
    pub(crate) watermark_timeout: Option<Duration>,
    /// Longest single wait.
    pub(crate) poll_duration: Duration,
}

impl Settings {
    pub(crate) fn new(caplen: u32, poll_duration: Duration) -> Self {
        Self {
            caplen,
            tuning: Tuning {
                enabled: false,
                ..Tuning::default()
            },
            filter: String::new(),
            vlan: None,
            cluster: None,
            group: String::new(),
            handle: PortOptions::fresh_handle(),
            label: String::new(),
            watermark: None,
            watermark_timeout: None,
            poll_duration,
        }
    }

    /// The options of a port on `target`.
    pub(crate) fn options(&self, target: &str) -> PortOptions {
        let mut options = PortOptions::new(target)
            .filter_spec(self.filter_spec())
            .snaplen(self.caplen)
            .direction(self.tuning.direction)
            .sample(self.tuning.sample)
            .enabled(self.tuning.enabled)
            .watermark(self.watermark())
            .max_delay(self.max_delay())
            .handle(self.handle)
            .group(self.group.clone());
        if let Some((number, balance)) = self.cluster {
            options = options.cluster(format!("pfring-{number}"), balance);
        }
        if !self.label.is_empty() {
            options = options.label(self.label.clone());
        }
        options
    }

    /// What a port of the ring is known by: label and handle.
    pub(crate) fn names(&self) -> (String, u64) {
        (self.label.clone(), self.handle)
    }

    /// The program's filter and its VLAN in one expression.
    pub(crate) fn filter_spec(&self) -> FilterSpec {
        let filter = self.filter.trim();
        // NB: what stands behind `vlan` is looked for inside the tag, also behind `not vlan`.
        FilterSpec::Expression(match (self.vlan, filter) {
            (None, "") => return FilterSpec::All,
            (None, filter) => filter.into(),
            (Some(0), "") => "not vlan".into(),
            (Some(0), filter) => format!("({filter}) and not vlan"),
            (Some(id), "") => format!("vlan {id}"),
            (Some(id), filter) => format!("vlan {id} and ({filter})"),
        })
    }

    /// Packets at which a sleeper is woken.
    pub(crate) fn watermark(&self) -> u32 {
        self.watermark.unwrap_or(DEFAULT_WATERMARK)
    }

    /// How long an unread packet may wait for the watermark. One that the program did not ask for
    /// saves wake-ups where packets are many, and costs little where they are few.
    pub(crate) fn max_delay(&self) -> Duration {
        let default = match self.watermark {
            None => DEFAULT_DELAY.min(self.poll_duration),
            Some(_) => self.poll_duration,
        };
        self.watermark_timeout.unwrap_or(default)
    }
}

/// `DEFAULT_MIN_PKT_QUEUED`.
const DEFAULT_WATERMARK: u32 = 128;
const DEFAULT_DELAY: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watermark_that_nobody_asked_for_waits_only_for_a_moment() {
        let mut settings = Settings::new(0, Duration::from_millis(500));
        let told = |settings: &Settings| (settings.watermark(), settings.max_delay().as_millis());
        assert_eq!(told(&settings), (128, 10));
        settings.watermark = Some(1000);
        assert_eq!(told(&settings), (1000, 500));
        settings.watermark_timeout = Some(Duration::from_millis(20));
        assert_eq!(told(&settings), (1000, 20));
    }

    #[test]
    fn the_filter_is_looked_for_inside_the_vlan() {
        let mut settings = Settings::new(0, Duration::from_millis(500));
        assert_eq!(settings.filter_spec(), FilterSpec::All);
        settings.filter = "udp or tcp".into();
        settings.vlan = Some(7);
        let is = |text: &str| FilterSpec::Expression(text.into());
        assert_eq!(settings.filter_spec(), is("vlan 7 and (udp or tcp)"));
        settings.vlan = Some(0);
        assert_eq!(settings.filter_spec(), is("(udp or tcp) and not vlan"));
        settings.filter.clear();
        assert_eq!(settings.filter_spec(), is("not vlan"));
    }
}
