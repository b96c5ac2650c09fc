// Shows the token once; from then on the browser has a cookie, which no script can read.

const error = document.getElementById('error');

document.getElementById('form').onsubmit = async (event) => {
  event.preventDefault();
  error.hidden = true;
  const token = document.getElementById('token').value.trim();
  try {
    const headers = { Authorization: `Bearer ${token}` };
    const response = await fetch('login', { method: 'POST', headers });
    if (response.ok) return location.assign('./');
    error.textContent = (await response.json()).error;
  } catch {
    error.textContent = 'The server does not answer, or this cannot be a token.';
  }
  error.hidden = false;
};
