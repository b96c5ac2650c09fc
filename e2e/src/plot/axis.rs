//! From values to pixels, and which values are written beside an axis.

/// An axis of numbers.
#[derive(Clone, Copy, Debug)]
pub struct Axis {
    low: f64,
    high: f64,
    log: bool,
    /// Pixels at the low and the high end.
    pixels: (f64, f64),
}

impl Axis {
    /// An axis from zero, or a logarithmic one, that shows all values.
    #[must_use]
    pub fn over(values: &[f64], log: bool, pixels: (f64, f64)) -> Self {
        let most = values.iter().copied().fold(0.0, f64::max);
        let least = values.iter().copied().filter(|value| *value > 0.0);
        let least = least.fold(f64::INFINITY, f64::min);
        let (low, high) = match (log, most > 0.0) {
            (_, false) => (0.0, 1.0),
            (true, true) => (round_down(least * 0.9), round_up(most * 1.1)),
            (false, true) => (0.0, ceiling(most)),
        };
        Self {
            low,
            high,
            log: log && most > 0.0,
            pixels,
        }
    }

    /// The pixel of a value; what a logarithmic axis cannot show lies at its low end.
    #[must_use]
    pub fn at(&self, value: f64) -> f64 {
        let share = if self.log {
            let value = value.max(self.low);
            (value / self.low).log10() / (self.high / self.low).log10()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        let (from, to) = self.pixels;
        from + share.clamp(0.0, 1.0) * (to - from)
    }

    /// Values to write at the axis.
    #[must_use]
    pub fn ticks(&self) -> Vec<f64> {
        if !self.log {
            let step = step(self.high);
            let many = (self.high / step).round() as u32;
            return (0..=many).map(|tick| f64::from(tick) * step).collect();
        }
        let decades = (self.high / self.low).log10();
        let within: &[f64] = match decades {
            ..=3.0 => &[1.0, 2.0, 5.0],
            _ => &[1.0],
        };
        let first = self.low.log10().floor() as i32;
        let every = if decades > 7.0 { 2 } else { 1 };
        let mut ticks = Vec::new();
        for decade in (first..=first + decades.ceil() as i32 + 1).step_by(every) {
            ticks.extend(within.iter().map(|part| part * 10_f64.powi(decade)));
        }
        ticks.retain(|tick| (self.low * 0.999..=self.high * 1.001).contains(tick));
        ticks
    }
}

/// The next lower of 1, 2, 5, 10, 20 …
fn round_down(value: f64) -> f64 {
    let decade = 10_f64.powf(value.log10().floor());
    let steps = [5.0, 2.0].map(|part| part * decade);
    steps
        .into_iter()
        .find(|step| *step <= value)
        .unwrap_or(decade)
}

/// The next higher of them.
fn round_up(value: f64) -> f64 {
    let decade = 10_f64.powf(value.log10().floor());
    let steps = [1.0, 2.0, 5.0].map(|part| part * decade);
    steps
        .into_iter()
        .find(|step| *step >= value)
        .unwrap_or(10.0 * decade)
}

/// A round step that divides an axis up to `high` into four to eight parts.
fn step(high: f64) -> f64 {
    let decade = 10_f64.powf((high / 4.0).log10().floor());
    let steps = [5.0, 2.0, 1.0].map(|part| part * decade);
    steps
        .into_iter()
        .find(|step| high / step >= 3.99)
        .unwrap_or(decade)
}

fn ceiling(most: f64) -> f64 {
    let step = step(most);
    (most / step).ceil() * step
}

/// A number as an axis writes it.
#[must_use]
pub fn number(value: f64) -> String {
    let magnitude = value.abs();
    if magnitude >= 1e6 {
        format!("{}M", trimmed(value / 1e6))
    } else if magnitude >= 1e4 {
        format!("{}k", trimmed(value / 1e3))
    } else {
        trimmed(value)
    }
}

/// Three digits or so, without zeros at the end.
fn trimmed(value: f64) -> String {
    let digits = match value.abs() {
        magnitude if magnitude >= 100.0 || magnitude == 0.0 => 0,
        magnitude if magnitude >= 10.0 => 1,
        magnitude if magnitude >= 1.0 => 2,
        magnitude => (1.0 - magnitude.log10().floor()) as usize,
    };
    let text = format!("{value:.digits$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_reach_over_the_values() {
        let axis = Axis::over(&[1.5, 0.2], false, (100.0, 0.0));
        assert_eq!(axis.ticks().len(), 9, "{axis:?}");
        assert_eq!((axis.at(0.0), axis.at(1.6)), (100.0, 0.0));
        let axis = Axis::over(&[1.2, 9000.0], true, (0.0, 400.0));
        assert_eq!(axis.ticks(), [1.0, 10.0, 100.0, 1000.0, 10_000.0]);
        assert!((axis.at(10.0) - 100.0).abs() < 1e-6);
        let axis = Axis::over(&[24.0, 180.0], true, (0.0, 1.0));
        assert_eq!(axis.ticks(), [20.0, 50.0, 100.0, 200.0]);
        assert_eq!(axis.at(0.0), 0.0);
    }

    #[test]
    fn an_axis_without_values_is_drawn_too() {
        let axis = Axis::over(&[0.0], true, (0.0, 1.0));
        assert!(axis.ticks().len() > 1 && axis.at(0.0) == 0.0);
    }

    #[test]
    fn numbers_are_short() {
        let written = [0.0, 0.05, 1.25, 12.0, 1500.0, 20_000.0, 2_500_000.0].map(number);
        assert_eq!(written, ["0", "0.05", "1.25", "12", "1500", "20k", "2.5M"]);
    }
}
