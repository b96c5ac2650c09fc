//! What a row is, and what it brings.

use std::path::PathBuf;
use std::time::Duration;

use crate::capture;

/// Any error of a row: it is printed and ends that row, not the others.
pub(crate) type Error = Box<dyn std::error::Error>;
/// The result of a row.
pub(crate) type Result<T> = std::result::Result<T, Error>;

/// One line of the bench's plan: a name, a sentence and a function.
pub(crate) struct Row {
    /// Selected by any prefix of it.
    pub(crate) name: &'static str,
    /// What is measured, in one line.
    pub(crate) about: &'static str,
    /// Measures; ours and the peer's in turns.
    pub(crate) run: fn(&Plan) -> Result<Vec<Figure>>,
}

/// How often and how long to measure.
pub(crate) struct Plan {
    /// Rounds of ours and the peer's in turns.
    pub(crate) rounds: usize,
    /// Length of one measurement.
    pub(crate) time: Duration,
    /// The file of the figures.
    pub(crate) out: PathBuf,
    /// A real interface, for the row that measures on one.
    pub(crate) interface: Option<String>,
    /// Where recordings are written.
    pub(crate) disk: PathBuf,
}

impl Plan {
    /// Reads `ROUNDS`, `SECONDS`, `OUT` and `DISK`.
    pub(crate) fn from_env() -> Result<Self> {
        let word = |name, default: &str| std::env::var(name).unwrap_or(default.to_owned());
        // NB: bash has a variable SECONDS of its own but does not export it.
        let seconds = word("SECONDS", "1.0").parse::<f64>();
        let seconds = seconds.map_err(|error| format!("SECONDS: {error}"))?;
        let rounds = word("ROUNDS", "5").parse::<usize>();
        let rounds = rounds.map_err(|error| format!("ROUNDS: {error}"))?;
        let out: PathBuf = word("OUT", "target/bench/results.json").into();
        let beside = out.with_file_name("disk");
        Ok(Self {
            rounds: rounds.max(1),
            time: Duration::try_from_secs_f64(seconds.max(0.1))?,
            disk: std::env::var_os("DISK").map_or(beside, PathBuf::from),
            out,
            interface: std::env::var(capture::INTERFACE)
                .ok()
                .filter(|name| !name.is_empty()),
        })
    }
}

impl Plan {
    /// The same with measurements of at most this time.
    pub(crate) fn lasting(&self, time: Duration) -> Self {
        Self {
            rounds: self.rounds,
            time: self.time.min(time),
            out: self.out.clone(),
            interface: self.interface.clone(),
            disk: self.disk.clone(),
        }
    }
}

/// One result: ours, and the peer's from the same rounds.
#[derive(Clone)]
pub(crate) struct Figure {
    pub(crate) name: String,
    pub(crate) unit: &'static str,
    /// One sample per round.
    pub(crate) ours: Samples,
    /// Name and samples of the peer, where there is one.
    pub(crate) peer: Option<(String, Samples)>,
    /// What the machine allows, where something measurable bounds this figure.
    pub(crate) limit: Option<Limit>,
    /// What exactly both sides did.
    pub(crate) note: String,
}

/// What bounds a figure on this machine, measured in the same rounds and in the figure's unit.
#[derive(Clone)]
pub(crate) struct Limit {
    /// What was measured, in a few words.
    pub(crate) what: String,
    pub(crate) samples: Samples,
}

impl Limit {
    pub(crate) fn new(what: &str, samples: Samples) -> Self {
        let what = what.to_owned();
        Self { what, samples }
    }

    /// Of many samples of something else, each converted to the figure's unit.
    pub(crate) fn converted(what: &str, samples: &Samples, convert: impl Fn(f64) -> f64) -> Self {
        Self::new(what, samples.all().iter().copied().map(convert).collect())
    }
}

/// Samples of one quantity.
#[derive(Clone, Default)]
pub(crate) struct Samples {
    sorted: Vec<f64>,
    last: f64,
}

impl Samples {
    pub(crate) fn push(&mut self, sample: f64) {
        self.last = sample;
        self.sorted.push(sample);
        self.sorted.sort_by(f64::total_cmp);
    }

    /// The sample that was pushed last.
    pub(crate) fn last(&self) -> f64 {
        self.last
    }

    /// All of them, the lowest first.
    pub(crate) fn all(&self) -> &[f64] {
        &self.sorted
    }

    /// The middle sample, 0 without samples.
    pub(crate) fn median(&self) -> f64 {
        self.sorted
            .get(self.sorted.len() / 2)
            .copied()
            .unwrap_or(0.0)
    }

    /// Lowest and highest sample.
    pub(crate) fn range(&self) -> (f64, f64) {
        (
            self.sorted.first().copied().unwrap_or(0.0),
            self.sorted.last().copied().unwrap_or(0.0),
        )
    }
}

impl FromIterator<f64> for Samples {
    fn from_iter<T: IntoIterator<Item = f64>>(samples: T) -> Self {
        let mut all = Self::default();
        samples.into_iter().for_each(|sample| all.push(sample));
        all
    }
}

impl Figure {
    /// Ours divided by the peer's, medians.
    pub(crate) fn ratio(&self) -> Option<f64> {
        let (_, peer) = self.peer.as_ref()?;
        (peer.median() > 0.0).then(|| self.ours.median() / peer.median())
    }

    /// The share of the limit that ours reaches, medians: 1 at the limit, 0.5 at half of its rate or
    /// at twice its cost.
    pub(crate) fn reached(&self) -> Option<f64> {
        let (ours, limit) = (self.ours.median(), self.limit.as_ref()?.samples.median());
        let is_rate = ["Mpps", "MB/s", "Gb/s"]
            .iter()
            .any(|unit| self.unit.starts_with(unit));
        let (part, whole) = match is_rate {
            true => (ours, limit),
            false => (limit, ours),
        };
        (whole > 0.0).then(|| part / whole)
    }

    /// The same figure with a limit.
    pub(crate) fn limited(self, what: &str, samples: &Samples) -> Self {
        let limit = Some(Limit::new(what, samples.clone()));
        Self { limit, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_medians_and_ranges() {
        let mut figure = Figure {
            name: String::new(),
            unit: "Mpps",
            ours: Samples::default(),
            peer: Some((String::new(), Samples::default())),
            limit: None,
            note: String::new(),
        };
        assert_eq!((figure.ours.median(), figure.ratio()), (0.0, None));
        for sample in [9.0, 1.0, 4.0] {
            figure.ours.push(sample);
        }
        if let Some((_, peer)) = &mut figure.peer {
            peer.push(2.0);
        }
        assert_eq!(figure.ours.range(), (1.0, 9.0));
        assert_eq!(figure.ratio(), Some(2.0));
        figure.limit = Some(Limit::new("", [8.0].into_iter().collect()));
        assert_eq!(figure.reached(), Some(0.5));
        figure.unit = "ns per packet";
        assert_eq!(figure.reached(), Some(2.0));
    }
}
