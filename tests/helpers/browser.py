"""A headless Chromium, driven by the DevTools protocol."""

import asyncio
import contextlib
import itertools
import json
import pathlib
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp

CHROMIUM = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
PATIENCE_S = 30
# As root there is no sandbox; the pages are those of this repository.
OPTIONS = (
  '--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --remote-debugging-port=0'.split()
)


class Tab:
  """One tab: evaluates JavaScript, presses keys, and keeps what the page reports to the console."""

  def __init__(self, socket: aiohttp.ClientWebSocketResponse):
    self.socket = socket
    self.problems: list[str] = []  # errors and violations of the page's policy
    self._numbers = itertools.count(1)
    self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
    self.reader = asyncio.create_task(self._read())

  async def _read(self):
    async for message in self.socket:
      data = json.loads(message.data)
      if 'id' in data:
        self._answers.pop(data['id']).set_result(data)
      elif data['method'] == 'Runtime.exceptionThrown':
        self.problems.append(str(data['params']['exceptionDetails']))
      elif data['method'] == 'Log.entryAdded' and data['params']['entry']['level'] in ('error', 'warning'):
        self.problems.append(f'{data["params"]["entry"]["source"]}: {data["params"]["entry"]["text"]}')
      elif data['method'] == 'Runtime.consoleAPICalled':
        self.problems.append(str(data['params']['args']))

  async def call(self, method: str, **params) -> dict[str, Any]:
    number = next(self._numbers)
    self._answers[number] = asyncio.get_running_loop().create_future()
    answer = self._answers[number]
    await self.socket.send_json({'id': number, 'method': method, 'params': params})
    result = await asyncio.wait_for(answer, PATIENCE_S)
    assert 'error' not in result, (method, result)
    return result['result']

  async def run(self, script: str) -> Any:
    """The value of a JavaScript expression; a promise is awaited."""
    found = await self.call('Runtime.evaluate', expression=script, awaitPromise=True, returnByValue=True)
    assert 'exceptionDetails' not in found, (script, found)
    return found['result'].get('value')

  async def wait_for(self, script: str):
    async with asyncio.timeout(PATIENCE_S):
      while not await self.run(script):
        await asyncio.sleep(0.05)

  async def open(self, url: str):
    await self.call('Page.navigate', url=url)
    await self.wait_for(f'location.href == {json.dumps(url)} && document.readyState == "complete"')

  async def press(self, key: str, code: int, *, ctrl: bool = False):
    event = {'key': key, 'code': key, 'windowsVirtualKeyCode': code, 'modifiers': 2 * ctrl}
    text = {'text': '\r'} if key == 'Enter' and not ctrl else {}  # which submits a form
    await self.call('Input.dispatchKeyEvent', type='keyDown', **event, **text)
    await self.call('Input.dispatchKeyEvent', type='keyUp', **event)

  async def type(self, text: str):
    """Inserts a text where the focus is."""
    await self.call('Input.insertText', text=text)

  async def show(self, width: int, height: int = 900, *, dark: bool = False):
    """Sets the size of the window and the reader's preference."""
    size = {'width': width, 'height': height, 'deviceScaleFactor': 1, 'mobile': False}
    await self.call('Emulation.setDeviceMetricsOverride', **size)
    scheme = {'name': 'prefers-color-scheme', 'value': 'dark' if dark else 'light'}
    await self.call('Emulation.setEmulatedMedia', features=[scheme])


@contextlib.contextmanager
def launched(folder: pathlib.Path) -> Iterator[str]:
  """A browser with one tab, whose profile is in `folder`; yields the address of the DevTools protocol."""
  command = [str(CHROMIUM), *OPTIONS, f'--user-data-dir={folder}', 'about:blank']
  process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
  try:
    file, until = folder / 'DevToolsActivePort', time.monotonic() + PATIENCE_S
    while not (file.exists() and '\n' in file.read_text()):
      assert process.poll() is None and time.monotonic() < until
      time.sleep(0.05)
    port = file.read_text().splitlines()[0]
    yield f'http://127.0.0.1:{port}'
  finally:
    process.terminate()
    process.wait(PATIENCE_S)


@contextlib.asynccontextmanager
async def opened(folder: pathlib.Path) -> AsyncIterator[Tab]:
  """The tab of a browser, which ends with the block."""
  with launched(folder) as address:
    async with aiohttp.ClientSession() as session:
      async with session.get(f'{address}/json/list') as response:
        (target,) = [target for target in await response.json() if target['type'] == 'page']
      async with session.ws_connect(target['webSocketDebuggerUrl'], max_msg_size=0) as socket:
        tab = Tab(socket)
        for domain in ('Page', 'Runtime', 'Log'):
          await tab.call(f'{domain}.enable')
        yield tab
        tab.reader.cancel()
